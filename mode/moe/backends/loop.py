"""One expert after the other, without those that have no tokens. Any dtype, any width, any device.

Backward is written out for the reasons given in `grouped_mm`. What lies between the products is made and used
up expert by expert, while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import silu_backward_

Work = Callable[[int, slice], None]  # of one expert, on its rows
Order = Callable[[Work, list[tuple[int, slice]]], None]  # does the work of all of them


def loop_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    return expert_by_expert(one_after_another, x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def one_after_another(work: Work, experts: list[tuple[int, slice]]) -> None:
    for expert, rows in experts:
        work(expert, rows)


def expert_by_expert(
    in_order: Order, x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor
) -> Tensor:
    """No two experts write to the same place, so that `in_order` may also do their work side by side."""
    out_QD: Tensor = _SwiGLUs.apply(in_order, x_QD, _rows_of(counts_e.tolist()), w1_eFD, w2_eDF, w3_eFD)
    return out_QD


def _rows_of(counts: list[int]) -> list[tuple[int, slice]]:
    """Every expert that has tokens, and its rows."""
    found, end = [], 0
    for expert, count in enumerate(counts):
        end += count
        if count:
            found.append((expert, slice(end - count, end)))
    return found


class _SwiGLUs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        in_order: Order,
        x_QD: Tensor,
        experts: list[tuple[int, slice]],
        w1_eFD: Tensor,
        w2_eDF: Tensor,
        w3_eFD: Tensor,
    ) -> Tensor:
        gate_QF = x_QD.new_empty(len(x_QD), w1_eFD.shape[1])
        up_QF, out_QD = torch.empty_like(gate_QF), torch.empty_like(x_QD)

        def compute(e: int, rows: slice) -> None:
            x_ND, gate_NF, up_NF = x_QD[rows], gate_QF[rows], up_QF[rows]
            torch.mm(x_ND, w1_eFD[e].t(), out=gate_NF)
            torch.mm(x_ND, w3_eFD[e].t(), out=up_NF)
            torch.mm(F.silu(gate_NF).mul_(up_NF), w2_eDF[e].t(), out=out_QD[rows])

        in_order(compute, experts)
        ctx.in_order, ctx.experts = in_order, experts
        ctx.save_for_backward(x_QD, gate_QF, up_QF, w1_eFD, w2_eDF, w3_eFD)
        return out_QD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[None, Tensor, None, Tensor, Tensor, Tensor]:
        x_QD, gate_QF, up_QF, w1_eFD, w2_eDF, w3_eFD = ctx.saved_tensors
        all_have_tokens = len(ctx.experts) == len(w1_eFD)
        new = torch.empty_like if all_have_tokens else torch.zeros_like  # an expert without tokens has no gradient
        grad_x_QD, grad_w1_eFD, grad_w2_eDF, grad_w3_eFD = torch.empty_like(x_QD), new(w1_eFD), new(w2_eDF), new(w3_eFD)

        def compute(e: int, rows: slice) -> None:
            x_ND, gate_NF, up_NF, grad_ND = x_QD[rows], gate_QF[rows], up_QF[rows], grad_QD[rows]
            active_NF = F.silu(gate_NF)
            torch.mm(grad_ND.t(), active_NF * up_NF, out=grad_w2_eDF[e])
            grad_hidden_NF = torch.mm(grad_ND, w2_eDF[e])
            grad_up_NF = active_NF.mul_(grad_hidden_NF)
            grad_gate_NF = silu_backward_(grad_hidden_NF.mul_(up_NF), gate_NF)
            torch.mm(grad_gate_NF.t(), x_ND, out=grad_w1_eFD[e])
            torch.mm(grad_up_NF.t(), x_ND, out=grad_w3_eFD[e])
            grad_x_ND = grad_x_QD[rows]
            torch.mm(grad_gate_NF, w1_eFD[e], out=grad_x_ND)
            torch.addmm(grad_x_ND, grad_up_NF, w3_eFD[e], out=grad_x_ND)

        ctx.in_order(compute, ctx.experts)
        return None, grad_x_QD, None, grad_w1_eFD, grad_w2_eDF, grad_w3_eFD
