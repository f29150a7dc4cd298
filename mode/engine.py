"""DeepSpeed's engine around a model with our layers, right where DeepSpeed alone is not."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import hjson
from deepspeed.accelerator import get_accelerator
from torch import nn

from mode.config.section import ConfigError
from mode.moe.deepspeed import MoE, by_mode_initialize, clip_gradients, place
from mode.training.safety.refusals import refuse_what_is_wrong


def initialize(model: nn.Module, config: dict[str, Any] | str | Path, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a model with `MoE` layers: (engine, optimizer, data loader, scheduler).

    `config` is DeepSpeed's, a dictionary or a JSON file. Beside what DeepSpeed does, settings under which it computes
    something else are refused, and at ZeRO stage 0 gradients are clipped by the norm of the whole model.
    """
    settings = config if isinstance(config, dict) else hjson.loads(Path(config).read_text())
    rank, world_size = place()
    unchecked = refuse_what_is_wrong(settings, world_size, on_cpu=get_accelerator().device_name() == "cpu")
    if unchecked and rank == 0:
        warnings.warn(f"not checked with mode, so compare a short run: {', '.join(unchecked)}", stacklevel=2)
    kwargs.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    with by_mode_initialize():
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=settings, **kwargs)
    if engine.zero_optimization_stage() == 0:
        _clip_at_stage_0(engine)
    if engine.load_universal_checkpoint():
        engine.load_checkpoint = _refuse_to_load
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


def _refuse_to_load(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "checkpoint.load_universal",
        "is true, but DeepSpeed's own load restores no selection bias and at ZeRO stage 3 a wrong optimizer step; call "
        "mode.load_universal(engine, folder) instead of engine.load_checkpoint",
    )
