"""Routing figures: sums taken from records on the device, and the numbers people look at.

A step's sums are added over micro-batches and ranks, so every figure is of the whole global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, distributed

from mode import accounting
from mode.accounting import BlockCounts
from mode.config.settings import ModeConfig
from mode.records import BlockRouting

# The columns of a block's sums; the choices of each expert column follow.
TOKENS, KEPT, PREDICTED_RIGHT, ABOVE_HALF, PROCESSED, NO_OP, DROPPED, GATES, CHOICES = range(9)


@torch.no_grad()
def routing_sums(config: ModeConfig, routing: Sequence[BlockRouting]) -> Tensor:
    """[layers, CHOICES + J] float64, on the device and without waiting for it."""
    num_columns = 0 if config.experts is None else config.experts.num_columns
    rows = []
    for record in routing:
        positions_BS, depth, experts = record.positions_BS, record.depth, record.experts
        row = torch.zeros(CHOICES + num_columns, dtype=torch.float64, device=positions_BS.device)
        row[TOKENS] = row[KEPT] = positions_BS.numel()
        if depth is not None:
            kept_BL = depth.kept_BL()
            row[TOKENS], row[KEPT] = kept_BL.numel(), kept_BL.sum()
            row[ABOVE_HALF] = (depth.logits_BL > 0).sum()  # sigmoid above one half
            if depth.predicted_BL is not None:
                row[PREDICTED_RIGHT] = ((depth.predicted_BL > 0) == kept_BL).sum()
        if experts is not None:
            row[PROCESSED], row[NO_OP], row[DROPPED] = (
                experts.num_processed(),
                experts.num_no_op(),
                experts.num_dropped(),
            )
            row[GATES] = experts.sum_of_gates()
            row[CHOICES:] = experts.choice_counts_J()
        rows.append(row)
    return torch.stack(rows)


def counted_flops(
    config: ModeConfig, rows: int, sums: Sequence[Sequence[float]], capacity_fraction: Fraction | None = None
) -> int:
    """Training FLOPs of a step of `rows` sequences over all ranks, from the routes it took.

    `capacity_fraction` is the share of a sequence that routed blocks kept, by default the configuration's.
    Rows of a token-choice block run at the length of the fullest of their micro-batch; counted here is
    the expected length, the capacity.
    """
    expected = accounting.expected_counts(config, rows, capacity_fraction=capacity_fraction)
    counts = [
        BlockCounts(
            rows, block.length, block.slots, int(row[KEPT]), int(row[PROCESSED]), int(row[NO_OP]), int(row[DROPPED])
        )
        for block, row in zip(expected, sums, strict=True)
    ]
    return accounting.model_flops(config, counts).training


def depth_figures(config: ModeConfig, row: Sequence[float]) -> dict[str, float]:
    assert config.depth is not None
    figures = {"kept_fraction": row[KEPT] / row[TOKENS], "router_above_half": row[ABOVE_HALF] / row[TOKENS]}
    if config.depth.predictor is not None:
        figures["predictor_accuracy"] = row[PREDICTED_RIGHT] / row[TOKENS]
    return figures


def expert_figures(config: ModeConfig, row: Sequence[float]) -> dict[str, float]:
    """Shares of all choices, what experts' outputs are multiplied by, and how evenly choices fall on real experts."""
    assert config.experts is not None
    total = max(row[PROCESSED] + row[NO_OP] + row[DROPPED], 1.0)
    loads = [float(count) for count in row[CHOICES : CHOICES + config.experts.num_experts]]
    real, mean = max(sum(loads), 1.0), sum(loads) / len(loads)
    entropy = -sum(load / real * math.log(load / real) for load in loads if load)
    return {
        "no_op_share": row[NO_OP] / total,
        "dropped_share": row[DROPPED] / total,
        "mean_gate": row[GATES] / max(row[PROCESSED], 1.0),  # of the choices that experts processed
        "max_violation": max(loads) / mean - 1 if mean else 0.0,
        "dead_experts": float(sum(load == 0 for load in loads)),
        "load_entropy": entropy / math.log(len(loads)) if len(loads) > 1 else 1.0,  # 1: perfectly even
    }


def routing_figures(config: ModeConfig, sums: Sequence[Sequence[float]], detailed: bool) -> dict[str, float]:
    """Tags and values: means over layers (`max_violation` and `dead_experts`: the worst and the sum)."""
    by_layer: dict[str, dict[int, float]] = {}
    for layer, row in enumerate(sums):
        if config.is_routed(layer):
            for name, value in depth_figures(config, row).items():
                by_layer.setdefault(f"depth/{name}", {})[layer] = value
        if config.experts is not None:
            for name, value in expert_figures(config, row).items():
                by_layer.setdefault(f"experts/{name}", {})[layer] = value
    join: dict[str, Any] = {"experts/max_violation": max, "experts/dead_experts": sum}
    figures = {tag: join.get(tag, _mean)(values.values()) for tag, values in by_layer.items()}
    if detailed:
        figures |= {
            f"{tag}/block_{layer}": value for tag, values in by_layer.items() for layer, value in values.items()
        }
    return figures


def routing_histograms(
    routing: Sequence[BlockRouting], sums: Sequence[Sequence[float]]
) -> Iterator[tuple[str, Tensor]]:
    """Of all ranks: the router logits of the last micro-batch, the choices of the whole step. A collective."""
    for record in routing:
        if record.depth is not None:
            logits = record.depth.logits_BL.detach().contiguous()
            everyone = [torch.empty_like(logits) for _ in range(distributed.get_world_size())]
            distributed.all_gather(everyone, logits)
            yield f"histogram/depth_logits/block_{record.layer}", torch.cat(everyone)
        if record.experts is not None:
            counts = torch.tensor(sums[record.layer][CHOICES : CHOICES + record.experts.num_experts])
            yield f"histogram/tokens_per_expert/block_{record.layer}", counts


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


@torch.no_grad()
def decision_image(routing: Sequence[BlockRouting], row: int) -> Tensor:
    """What each block did with each token of one sequence: [layers, L] from 0 (skipped) to 1 (all its work).

    A kept token counts half for attention and half for the share of its choices that real experts process.
    """
    layers = []
    for record in routing:
        length = record.positions_BS.shape[1] if record.depth is None else record.depth.logits_BL.shape[1]
        work_S = torch.ones(record.positions_BS.shape[1])
        if record.experts is not None:
            processed_TD = record.experts.processed_TK.float().mean(dim=1, keepdim=True)
            work_S = 0.5 + 0.5 * record.experts.by_sequence(processed_TD)[row, :, 0].cpu()
        if record.depth is None:
            layers.append(work_S)
            continue
        kept_L = record.depth.kept_BL()[row].cpu()
        work_L = torch.zeros(length)
        work_L[kept_L] = work_S[: int(kept_L.sum())]
        layers.append(work_L)
    return torch.stack(layers)
