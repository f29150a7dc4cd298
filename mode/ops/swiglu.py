"""SwiGLU experts on rows sorted by expert, by torch's operators: in grouped matrix products, or one after another.

Backward is written out, for two reasons. It keeps the inputs and the two projections only, and recomputes the rest,
which is cheap. And it keeps the weights themselves, not views of them: under ZeRO-3 a view would hold on to the
gathered weights of every layer until backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm_unavailable(dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    """Why torch's grouped product cannot compute experts of these widths; None: it can."""
    if dtype not in GROUPED_MM_DTYPES:
        return f"grouped_mm knows no {str(dtype).removeprefix('torch.')}"
    odd = next((width for width in widths if width % 8), None)  # rows must be a multiple of 16 bytes
    return None if odd is None else f"grouped_mm needs widths that are multiples of 8, and one is {odd}"


def swiglu_rows(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """Grouped products where torch has them, otherwise one expert after another."""
    grouped = grouped_mm_unavailable(x_QD.dtype, tuple(w1_eFD.shape[1:])) is None
    return (grouped_mm_experts if grouped else loop_experts)(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def silu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of silu at `x`, in place: overwrites `grad`, which saves one tensor of that size."""
    return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)


def grouped_mm_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """All experts in grouped products: no padding, no loop, no host synchronisation."""
    ends_e = counts_e.cumsum(0).to(torch.int32)
    out_QD: Tensor = _GroupedSwiGLU.apply(x_QD, ends_e, w1_eFD, w2_eDF, w3_eFD)
    return out_QD


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_QD: Tensor, ends_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
        gate_QF = F.grouped_mm(x_QD, w1_eFD.transpose(1, 2), offs=ends_e)
        up_QF = F.grouped_mm(x_QD, w3_eFD.transpose(1, 2), offs=ends_e)
        ctx.save_for_backward(x_QD, gate_QF, up_QF, ends_e, w1_eFD, w2_eDF, w3_eFD)
        return F.grouped_mm(F.silu(gate_QF).mul_(up_QF), w2_eDF.transpose(1, 2), offs=ends_e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        x_QD, gate_QF, up_QF, ends_e, w1_eFD, w2_eDF, w3_eFD = ctx.saved_tensors
        grad_QD = grad_QD.contiguous()
        active_QF = F.silu(gate_QF)
        grad_w2_eDF = F.grouped_mm(grad_QD.t(), active_QF * up_QF, offs=ends_e)
        grad_hidden_QF = F.grouped_mm(grad_QD, w2_eDF, offs=ends_e)
        grad_up_QF = active_QF.mul_(grad_hidden_QF)
        grad_gate_QF = silu_backward_(grad_hidden_QF.mul_(up_QF), gate_QF)
        grad_w1_eFD = F.grouped_mm(grad_gate_QF.t(), x_QD, offs=ends_e)
        grad_w3_eFD = F.grouped_mm(grad_up_QF.t(), x_QD, offs=ends_e)
        grad_x_QD = F.grouped_mm(grad_gate_QF, w1_eFD, offs=ends_e)
        grad_x_QD += F.grouped_mm(grad_up_QF, w3_eFD, offs=ends_e)
        return grad_x_QD, None, grad_w1_eFD, grad_w2_eDF, grad_w3_eFD


def loop_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """One expert after the other, without those that have no rows. Any dtype, any width, any device.

    What lies between the products is made and used up expert by expert, while it is in the processor's cache.
    Products name their `out`, which autocast leaves alone.
    """
    out_QD: Tensor = _SwiGLUs.apply(x_QD, counts_e.tolist(), w1_eFD, w2_eDF, w3_eFD)
    return out_QD


class _SwiGLUs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_QD: Tensor, counts: list[int], w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
        gate_QF = x_QD.new_empty(len(x_QD), w1_eFD.shape[1])
        up_QF, out_QD = torch.empty_like(gate_QF), torch.empty_like(x_QD)
        x, gate, up, out = (rows.split(counts) for rows in (x_QD, gate_QF, up_QF, out_QD))  # of every expert
        w1, w2, w3 = (weights.transpose(1, 2).unbind() for weights in (w1_eFD, w2_eDF, w3_eFD))
        for e, count in enumerate(counts):
            if count:
                torch.mm(x[e], w1[e], out=gate[e])
                torch.mm(x[e], w3[e], out=up[e])
                torch.mm(F.silu(gate[e]).mul_(up[e]), w2[e], out=out[e])
        ctx.counts = counts
        ctx.save_for_backward(x_QD, gate_QF, up_QF, w1_eFD, w2_eDF, w3_eFD)
        return out_QD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: Tensor) -> tuple[Tensor | None, ...]:
        x_QD, gate_QF, up_QF, *all_weights = ctx.saved_tensors
        grad_x_QD = torch.empty_like(x_QD)
        new = torch.zeros_like if 0 in ctx.counts else torch.empty_like  # an expert without tokens has no gradient
        all_grads = [new(weights) for weights in all_weights]
        x, gate, up, grad, grad_x = (rows.split(ctx.counts) for rows in (x_QD, gate_QF, up_QF, grad_QD, grad_x_QD))
        w1, w2, w3, grad_w1, grad_w2, grad_w3 = (weights.unbind() for weights in (*all_weights, *all_grads))
        for e, count in enumerate(ctx.counts):
            if count:
                active = F.silu(gate[e])
                hidden = active * up[e]
                torch.mm(grad[e].t(), hidden, out=grad_w2[e])
                torch.mm(grad[e], w2[e], out=hidden)  # used up: its gradient takes its memory
                grad_up = active.mul_(hidden)
                grad_gate = silu_backward_(hidden.mul_(up[e]), gate[e])
                torch.mm(grad_gate.t(), x[e], out=grad_w1[e])
                torch.mm(grad_up.t(), x[e], out=grad_w3[e])
                torch.mm(grad_gate, w1[e], out=grad_x[e])
                torch.addmm(grad_x[e], grad_up, w3[e], out=grad_x[e])
        return grad_x_QD, None, *all_grads
