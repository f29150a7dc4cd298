"""Validation loss, with top-k or causal routing, exact for any number of ranks.

Every rank enters every block, also one in which it keeps no token: under expert parallelism and ZeRO stage 3 a
block is a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mode.data import Split, spread_rows, validation_batches
from mode.moe.router import ExpertRouter
from mode.records import BlockRouting
from mode.training.loop.inputs import model_inputs
from mode.transformer.losses import token_losses


@dataclass(frozen=True)
class DepthShares:
    """How a routed block decided about the evaluated tokens."""

    kept: float  # share of the tokens
    predictor_accuracy: float | None  # share whose predictor agrees with what was kept; None: it did not speak
    router_accuracy: float  # share whose router logit is above 0 where the token was kept, and only there


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token over the evaluated rows
    by_position: list[float]  # of predicting a row's second token, third, ...: what the tokens before are worth
    depth: dict[int, DepthShares]  # by layer, of the routed blocks
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
    causal: bool | str = False,
    dropping: bool = False,
) -> Evaluation:
    """The mean loss of `num_rows` rows spread over the split: always the same ones, shared by the ranks.

    `causal` as in the model's forward: False is top-k routing, as in training, which sees the future. With
    `dropping`, experts take no more of a batch than their capacity, as in training; otherwise all that choose them.
    `progress` is called before every batch. A plain model in place of the engine needs no process group.
    """
    alone = not distributed.is_initialized()
    losses: Tensor | float = 0.0
    weight = torch.zeros((), dtype=torch.float64, device=device)
    shares: Tensor | float = 0.0
    routing: tuple[BlockRouting, ...] = ()
    rows = spread_rows(split.rows, num_rows)
    with _evaluating(engine, dropping):
        for batch in validation_batches(
            rows,
            batch_size=batch_size,
            rank=0 if alone else distributed.get_rank(),
            world_size=1 if alone else distributed.get_world_size(),
            end_of_text=end_of_text,
        ):
            progress()
            out = engine(**model_inputs(batch, device), causal=causal)
            weights_B = batch.weights.to(device)
            losses = losses + weights_B.double() @ token_losses(out.logits, batch.input_ids.to(device)).double()
            weight += weights_B.sum(dtype=torch.float64)
            shares = shares + depth_sums(out.routing, weights_B)
            routing = routing or out.routing
    assert isinstance(shares, Tensor) and isinstance(losses, Tensor)
    if not alone:
        distributed.all_reduce(losses)
        distributed.all_reduce(weight)
        distributed.all_reduce(shares)
    layers = [record.layer for record in routing if record.depth is not None]
    spoke = {record.layer for record in routing if record.depth is not None and record.depth.predicted_BL is not None}
    depth = {
        layer: DepthShares(kept, predicted if layer in spoke else None, above)
        for layer, (kept, predicted, above) in zip(layers, (shares[:, 1:] / shares[:, :1]).tolist(), strict=True)
    }
    by_position = losses / weight
    return Evaluation(by_position.mean().item(), by_position.tolist(), depth, routing)


@contextlib.contextmanager
def _evaluating(model: nn.Module, dropping: bool) -> Iterator[None]:
    """Puts a model into evaluation mode, and every module of it back into the mode it was in."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    if dropping:
        for module in was_training:
            if isinstance(module, ExpertRouter):
                module.train()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


def depth_sums(routing: Sequence[BlockRouting], weights_B: Tensor) -> Tensor:
    """[routed blocks, 4] float64, rows times their weight: tokens, kept, predicted rightly, by the router rightly."""
    sums = []
    for record in routing:
        if record.depth is None:
            continue
        kept_BL = record.depth.kept_BL()
        predicted_BL = record.depth.logits_BL if record.depth.predicted_BL is None else record.depth.predicted_BL
        parts = (
            torch.ones_like(kept_BL),
            kept_BL,
            (predicted_BL > 0) == kept_BL,
            (record.depth.logits_BL > 0) == kept_BL,
        )
        sums.append(torch.stack([(part.sum(dim=1) * weights_B.double()).sum() for part in parts]))
    return torch.stack(sums) if sums else weights_B.new_zeros(0, 4, dtype=torch.float64)
