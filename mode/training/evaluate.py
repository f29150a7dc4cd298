"""Validation loss, exact for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from mode.data import Split, spread_rows, validation_batches
from mode.layers import at_least_float32
from mode.routing import BlockRouting
from mode.training.step import model_inputs


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token over the evaluated rows
    routing: tuple[BlockRouting, ...]  # of this rank's first batch, for pictures


@torch.no_grad()
def evaluate(
    engine: Any,
    split: Split,
    *,
    num_rows: int,
    batch_size: int,
    end_of_text: int | None,
    device: torch.device,
    progress: Callable[[], None],
) -> Evaluation:
    """The mean loss of `num_rows` rows spread over the split: always the same ones, shared by the ranks.

    `progress` is called before every batch.
    """
    engine.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    routing: tuple[BlockRouting, ...] = ()
    rows = spread_rows(split.rows, num_rows)
    for batch in validation_batches(
        rows,
        batch_size=batch_size,
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
        end_of_text=end_of_text,
    ):
        progress()
        out = engine(**model_inputs(batch, device))
        losses_B = row_losses(out.logits, batch.input_ids.to(device))
        weights_B = batch.weights.to(device)
        totals += torch.stack([(losses_B * weights_B).sum(dtype=torch.float64), weights_B.sum(dtype=torch.float64)])
        routing = routing or out.routing
    distributed.all_reduce(totals)
    engine.train()
    return Evaluation((totals[0] / totals[1]).item(), routing)


def row_losses(logits_BLV: Tensor, ids_BL: Tensor) -> Tensor:
    """Each row's mean loss over its L - 1 predictions."""
    targets_BL = F.pad(ids_BL[:, 1:], (0, 1), value=-100)
    losses = F.cross_entropy(
        at_least_float32(logits_BLV).flatten(0, 1), targets_BL.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view_as(targets_BL).sum(dim=1) / (ids_BL.shape[1] - 1)
