"""DeepSpeed's engine around a model with our layers, right where DeepSpeed alone is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from mode.config.section import ConfigError
from mode.moe.deepspeed import MoE, by_mode_initialize, clip_gradients


def initialize(model: nn.Module, config: dict[str, Any] | str | Path, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a model with `MoE` layers: (engine, optimizer, data loader, scheduler).

    `config` is DeepSpeed's, a dictionary or a JSON file. Beside what DeepSpeed does, settings under which it computes
    something else are refused, and at ZeRO stage 0 gradients are clipped by the norm of the whole model.
    """
    kwargs.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    config = str(config) if isinstance(config, Path) else config
    with by_mode_initialize():
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=config, **kwargs)
    if engine.zero_optimization_stage() == 0:
        _clip_at_stage_0(engine)
    return engine, optimizer, loader, scheduler


def _clip_at_stage_0(engine: Any) -> None:
    spread = any(isinstance(module, MoE) and module.ep_size > 1 for module in engine.module.modules())
    half = engine.fp16_enabled() or engine.bfloat16_enabled()
    if spread and half and engine.gradient_clipping() > 0:
        raise ConfigError(
            "zero_optimization.stage",
            "is 0 in half precision with ep_size above 1, where DeepSpeed leaves experts out of the gradient norm; use "
            "stage 1, or set gradient_clipping to 0",
        )
    if not half:
        engine.clip_fp32_gradients = partial(_clip, engine)


def _clip(engine: Any) -> None:
    engine._global_grad_norm = clip_gradients(engine.module, engine.gradient_clipping())


def load_universal(engine: Any, folder: str | Path) -> dict[str, Any]:
    """Restores the engine from a universal checkpoint, made by DeepSpeed's `ds_to_universal`; returns the client state.

    The engine's configuration must have `"checkpoint": {"load_universal": true}`.
    """
    folder = Path(folder)
    path, state = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if path is None:
        raise ConfigError("checkpoint", f"{folder} holds no universal checkpoint that DeepSpeed can load")
    separate_optimizer_steps(engine)
    return dict(state)


def separate_optimizer_steps(engine: Any) -> None:
    """DeepSpeed gives all parts of a stage-3 optimizer one and the same step tensor, which each would then count up."""
    for values in engine.optimizer.optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"] = values["step"].clone()
