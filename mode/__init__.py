"""MoDE, Mixture-of-Depths-and-Experts, for DeepSpeed.

The public names are imported on first use, so that `mode.accounting` and `mode.config` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mode.config.file import load_config
    from mode.config.section import ConfigError
    from mode.config.settings import DepthConfig, ExpertsConfig, ModeConfig
    from mode.costs import routing_costs
    from mode.depth.layer import DepthRouted
    from mode.engine import initialize
    from mode.moe.deepspeed import MoE
    from mode.records import auxiliary_loss, collect_routing
    from mode.steps import after_step
    from mode.transformer.model import ModeOutput, ModeTransformer
    from mode.universal import load_universal

__version__ = "0.1.0"

_HOMES = {
    "MoE": "mode.moe.deepspeed",
    "DepthRouted": "mode.depth.layer",
    "collect_routing": "mode.records",
    "auxiliary_loss": "mode.records",
    "after_step": "mode.steps",
    "routing_costs": "mode.costs",
    "initialize": "mode.engine",
    "load_universal": "mode.universal",
    "ModeTransformer": "mode.transformer.model",
    "ModeOutput": "mode.transformer.model",
    "ModeConfig": "mode.config.settings",
    "ExpertsConfig": "mode.config.settings",
    "DepthConfig": "mode.config.settings",
    "ConfigError": "mode.config.section",
    "load_config": "mode.config.file",
}
__all__ = [
    "ConfigError",
    "DepthConfig",
    "DepthRouted",
    "ExpertsConfig",
    "MoE",
    "ModeConfig",
    "ModeOutput",
    "ModeTransformer",
    "after_step",
    "auxiliary_loss",
    "collect_routing",
    "initialize",
    "load_config",
    "load_universal",
    "routing_costs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
