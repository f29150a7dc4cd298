"""One optimizer step on this rank: forward and backward for every micro-batch, then the update.

Knows nothing of logging, saving or when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, distributed

from mode.config.file import RunConfig
from mode.data import Batch
from mode.moe.deepspeed import clip_gradients
from mode.records import BlockRouting
from mode.training.logging.metrics import CHOICES, routing_sums
from mode.training.loop.inputs import Inputs, model_inputs
from mode.transformer.model import ModeOutput


@dataclass(frozen=True)
class Step:
    """What an optimizer step leaves to report. Everything is of the whole global batch unless said otherwise."""

    sums: Tensor  # routing_sums, float64
    losses: dict[str, Tensor]  # summed over this rank's micro-batches, float64: "total", then its terms
    grad_norm: float  # before clipping; not finite or negative where fp16 overflowed
    lr: float
    routing: tuple[BlockRouting, ...]  # of this rank's last micro-batch


def optimizer_step(
    engine: Any,
    run: RunConfig,
    batches: Iterable[Batch],
    device: torch.device,
    approve: Callable[[list[Tensor], Inputs], None],
    capacity_fraction: Fraction | None = None,
) -> Step:
    """Trains on this rank's micro-batches. `approve` sees their losses when all gradients are there, and may raise.

    `capacity_fraction` is the share of a sequence that routed blocks keep in this step; None: the configuration's.
    The selection biases move here too, once, by the choices of all ranks.
    """
    outputs: list[Tensor] = []
    sums: Tensor | None = None
    for batch in batches:
        inputs = model_inputs(batch, device)
        losses, routing = _forward_and_backward(engine, inputs, capacity_fraction)
        outputs.append(torch.stack(list(losses.values())).double())
        found = routing_sums(run.mode, routing)
        sums = found if sums is None else sums + found
        if engine.is_gradient_accumulation_boundary():
            approve([terms[0] for terms in outputs], inputs)
            norm = clip_gradients(engine.module, run.engine.gradient_clipping) if run.engine.zero_stage == 0 else None
            lr = engine.get_lr()[0]
        engine.step()
    assert sums is not None
    distributed.all_reduce(sums)
    engine.module.move_biases(dict(enumerate(sums[:, CHOICES:])))
    losses = dict(zip(losses, torch.stack(outputs).sum(dim=0), strict=True))
    return Step(sums, losses, float(engine.get_global_grad_norm() if norm is None else norm), lr, routing)


def _forward_and_backward(
    engine: Any, inputs: Inputs, capacity_fraction: Fraction | None
) -> tuple[dict[str, Tensor], tuple[BlockRouting, ...]]:
    """(losses: "total", then its terms; routing). Returns no logits: they are freed before the next forward pass."""
    out: ModeOutput = engine(**inputs, labels=inputs["input_ids"], capacity_fraction=capacity_fraction)
    assert out.loss is not None
    engine.backward(out.loss)
    return {"total": out.loss.detach(), **{name: term.detach() for name, term in out.losses.items()}}, out.routing
