"""One expert after the other, without those that have no tokens. Any dtype, any width, any device.

Backward is written out for the reasons given in `grouped_mm`. What lies between the products is made and used
up expert by expert, while it is still in the processor's cache. Products name their `out`, which autocast leaves alone:
it has a state for each thread, and the result must not depend on which one computes an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import silu_backward_

Work = Callable[[int], None]  # of one expert
Order = Callable[[Work, list[int]], None]  # does the work of all that have tokens, given how many each has


def loop_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    return expert_by_expert(one_after_another, x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def one_after_another(work: Work, counts: list[int]) -> None:
    for expert, count in enumerate(counts):
        if count:
            work(expert)


def expert_by_expert(
    in_order: Order, x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """No two experts write to the same place, so that `in_order` may also do their work side by side."""
    out_QD: Tensor = _SwiGLUs.apply(in_order, x_QD, counts_e.tolist(), w1_eFD, w2_eDF, w3_eFD)
    return out_QD


class _SwiGLUs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, in_order: Order, x_QD: Tensor, counts: list[int], w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
    ) -> Tensor:
        gate_QF = x_QD.new_empty(len(x_QD), w1_eFD.shape[1])
        up_QF, out_QD = torch.empty_like(gate_QF), torch.empty_like(x_QD)
        x, gate, up, out = (rows.split(counts) for rows in (x_QD, gate_QF, up_QF, out_QD))  # of every expert
        w1, w2, w3 = (weights.transpose(1, 2).unbind() for weights in (w1_eFD, w2_eDF, w3_eFD))

        def compute(e: int) -> None:
            torch.mm(x[e], w1[e], out=gate[e])
            torch.mm(x[e], w3[e], out=up[e])
            torch.mm(F.silu(gate[e]).mul_(up[e]), w2[e], out=out[e])

        in_order(compute, counts)
        ctx.in_order, ctx.counts = in_order, counts
        ctx.save_for_backward(x_QD, gate_QF, up_QF, w1_eFD, w2_eDF, w3_eFD)
        return out_QD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor | None, ...]:
        x_QD, gate_QF, up_QF, *all_weights = ctx.saved_tensors
        grad_x_QD = torch.empty_like(x_QD)
        new = torch.zeros_like if 0 in ctx.counts else torch.empty_like  # an expert without tokens has no gradient
        all_grads = [new(weights) for weights in all_weights]
        x, gate, up, grad, grad_x = (r.split(ctx.counts) for r in (x_QD, gate_QF, up_QF, grad_QD, grad_x_QD))
        w1, w2, w3, grad_w1, grad_w2, grad_w3 = (weights.unbind() for weights in (*all_weights, *all_grads))

        def compute(e: int) -> None:
            active_NF = F.silu(gate[e])
            torch.mm(grad[e].t(), active_NF * up[e], out=grad_w2[e])
            grad_hidden_NF = torch.mm(grad[e], w2[e], out=torch.empty_like(active_NF))
            grad_up_NF = active_NF.mul_(grad_hidden_NF)
            grad_gate_NF = silu_backward_(grad_hidden_NF.mul_(up[e]), gate[e])
            torch.mm(grad_gate_NF.t(), x[e], out=grad_w1[e])
            torch.mm(grad_up_NF.t(), x[e], out=grad_w3[e])
            torch.mm(grad_gate_NF, w1[e], out=grad_x[e])
            torch.addmm(grad_x[e], grad_up_NF, w3[e], out=grad_x[e])

        ctx.in_order(compute, ctx.counts)
        return None, grad_x_QD, None, *all_grads
