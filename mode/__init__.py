"""MoDE, Mixture-of-Depths-and-Experts, for DeepSpeed.

The public names are imported on first use, so that `mode.accounting` and `mode.config` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mode.config import ModeConfig
    from mode.config_file import load_config
    from mode.model.transformer import ModeOutput, ModeTransformer
    from mode.section import ConfigError

__version__ = "0.1.0"
__all__ = ["ConfigError", "ModeConfig", "ModeOutput", "ModeTransformer", "load_config"]

_HOMES = {
    "ConfigError": "mode.section",
    "ModeConfig": "mode.config",
    "load_config": "mode.config_file",
    "ModeOutput": "mode.model.transformer",
    "ModeTransformer": "mode.model.transformer",
}


_MODULES = ("generation",)  # that users call by their full name: mode.generation.stream


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mode.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
