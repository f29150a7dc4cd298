"""All experts in grouped matrix products of torch: no padding, no loop, no host synchronisation.

float32, bfloat16 and float16; torch asks for rows of a multiple of 16 bytes, which the configuration
ensures by asking for widths that are multiples of 8.

Backward is written out, for two reasons. It keeps the inputs and the two projections only, and makes the
rest again, which is cheap. And it keeps the weights themselves, not views of them: under ZeRO-3 a view
would hold on to the gathered weights of every layer until backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import silu_backward_


def grouped_mm_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
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
