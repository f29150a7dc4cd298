"""One expert after the other, without those that have no tokens. Any dtype, any width, any device.

Backward is written out for the reasons given in `grouped_mm`. What lies between the products is made and used up
expert by expert, while it is still in the processor's cache; for experts with few rows it is done for some of them at
once, because starting an operation would take longer than doing it. Products name their `out`, which autocast leaves
alone: it has a state for each thread, and the result must not depend on which one computes an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import silu_backward_

Work = Callable[[int], None]  # of one group of experts
Order = Callable[[Work, list[int]], None]  # does the work of all groups, given how many rows each has

ENOUGH_ROWS = 256  # of a group: from there on what lies between the products takes longer than starting it
CACHE_LINE = 64  # bytes


def loop_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    return expert_by_expert(one_after_another, 1, x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def one_after_another(work: Work, counts: list[int]) -> None:
    for group, count in enumerate(counts):
        if count:
            work(group)


def neighbours(counts: Sequence[int], enough: int) -> list[list[int]]:
    """The experts that have tokens, in order, in groups of `enough` rows or more (the last may have fewer)."""
    groups: list[list[int]] = []
    rows = enough
    for expert, count in enumerate(counts):
        if not count:
            continue
        if rows >= enough:
            groups.append([])
            rows = 0
        groups[-1].append(expert)
        rows += count
    return groups


def expert_by_expert(
    in_order: Order,
    num_groups: int,
    x_QD: Tensor,
    counts_e: Tensor,
    w1_eFD: Tensor,
    w2_eDF: Tensor,
    w3_eFD: Tensor,
) -> Tensor:
    """No two groups write to the same place, so that `in_order` may also do their work side by side.

    There are some `num_groups` of them, if there are as many experts and rows. They do not change the result: how a
    product rounds depends on where in a cache line its rows begin, so that is the same for all of them, or each
    expert is a group of its own.
    """
    counts = counts_e.tolist()
    fits = w1_eFD.shape[1] * w1_eFD.element_size() % CACHE_LINE == 0
    groups = neighbours(counts, min(ENOUGH_ROWS, len(x_QD) // num_groups) if fits else 1)
    out_QD: Tensor = _SwiGLUs.apply(in_order, x_QD, counts, groups, w1_eFD, w2_eDF, w3_eFD)
    return out_QD


class _SwiGLUs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        in_order: Order,
        x_QD: Tensor,
        counts: list[int],
        groups: list[list[int]],
        w1_eFD: Tensor,
        w2_eDF: Tensor,
        w3_eFD: Tensor,
    ) -> Tensor:
        gate_QF = x_QD.new_empty(len(x_QD), w1_eFD.shape[1])
        up_QF, out_QD = torch.empty_like(gate_QF), torch.empty_like(x_QD)
        x, gate, up, out = (r.split(counts) for r in (x_QD, gate_QF, up_QF, out_QD))  # of every expert
        w1, w2, w3 = (weights.transpose(1, 2).unbind() for weights in (w1_eFD, w2_eDF, w3_eFD))
        rows = [sum(counts[e] for e in group) for group in groups]
        gates, ups = gate_QF.split(rows), up_QF.split(rows)  # of every group

        def compute(g: int) -> None:
            for e in groups[g]:
                torch.mm(x[e], w1[e], out=gate[e])
                torch.mm(x[e], w3[e], out=up[e])
            hidden_NF = F.silu(gates[g]).mul_(ups[g])
            for e, hidden in zip(groups[g], hidden_NF.split([counts[e] for e in groups[g]]), strict=True):
                torch.mm(hidden, w2[e], out=out[e])

        in_order(compute, rows)
        ctx.in_order, ctx.counts, ctx.groups, ctx.rows = in_order, counts, groups, rows
        ctx.save_for_backward(x_QD, gate_QF, up_QF, w1_eFD, w2_eDF, w3_eFD)
        return out_QD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor | None, ...]:
        x_QD, gate_QF, up_QF, *all_weights = ctx.saved_tensors
        grad_x_QD = torch.empty_like(x_QD)
        new = torch.zeros_like if 0 in ctx.counts else torch.empty_like  # an expert without tokens has no gradient
        all_grads = [new(weights) for weights in all_weights]
        x, grad, grad_x = (r.split(ctx.counts) for r in (x_QD, grad_QD, grad_x_QD))
        w1, w2, w3, grad_w1, grad_w2, grad_w3 = (weights.unbind() for weights in (*all_weights, *all_grads))
        groups, rows = ctx.groups, ctx.rows
        gates, ups = gate_QF.split(rows), up_QF.split(rows)

        def compute(g: int) -> None:
            counts = [ctx.counts[e] for e in groups[g]]
            active_NF = F.silu(gates[g])
            hidden_NF = active_NF * ups[g]
            for e, hidden in zip(groups[g], hidden_NF.split(counts), strict=True):
                torch.mm(grad[e].t(), hidden, out=grad_w2[e])
                torch.mm(grad[e], w2[e], out=hidden)  # used up: its gradient takes its memory
            grad_up_NF = active_NF.mul_(hidden_NF)
            grad_gate_NF = silu_backward_(hidden_NF.mul_(ups[g]), gates[g])
            of_each = zip(groups[g], grad_gate_NF.split(counts), grad_up_NF.split(counts), strict=True)
            for e, grad_gate, grad_up in of_each:
                torch.mm(grad_gate.t(), x[e], out=grad_w1[e])
                torch.mm(grad_up.t(), x[e], out=grad_w3[e])
                torch.mm(grad_gate, w1[e], out=grad_x[e])
                torch.addmm(grad_x[e], grad_up, w3[e], out=grad_x[e])

        ctx.in_order(compute, rows)
        return None, grad_x_QD, None, None, *all_grads
