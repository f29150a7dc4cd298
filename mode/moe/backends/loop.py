"""One expert after the other, without those that have no tokens. Any dtype, any width, any device.

Backward is written out for the reasons given in `grouped_mm`. What lies between the products is made and used up
expert by expert, while it is still in the processor's cache. Products name their `out`, which autocast leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import silu_backward_


def loop_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
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
