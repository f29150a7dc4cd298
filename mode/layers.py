"""Small parts that more than one package builds on. Knows nothing of routing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mode.native import functions as native


def at_least_float32(x: Tensor) -> Tensor:
    """Routers and losses work in float32 whatever the model's precision; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def silu_backward_(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of silu at `x`, in the memory of `grad`, which is used up: one tensor of that size less."""
    return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=grad)


class Scorer(nn.Module):
    """The weights of a router, which scores in float32 whatever the model's precision.

    A module of its own, whose `forward` returns tensors: ZeRO-3 gathers a module's parameters when it is called, and
    for backward only if it finds tensors among the outputs, where it does not look into records.
    """

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, width))

    def logits(self, x_XD: Tensor) -> Tensor:
        with torch.autocast(x_XD.device.type, enabled=False):
            return F.linear(at_least_float32(x_XD), at_least_float32(self.weight))


class RMSNorm(nn.RMSNorm):
    """Torch has a kernel for it on GPUs. On a CPU it takes ten operations, and fifteen in backward."""

    def forward(self, x_XD: Tensor) -> Tensor:
        assert self.eps is not None
        if native.takes(x_XD, self.weight):
            return native.rms_norm(x_XD, self.weight, self.eps)
        return super().forward(x_XD)


class SwiGLU(nn.Module):
    """The gated feed-forward: w2 (silu(w1 x) * w3 x)."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden_width, bias=False)
        self.w2 = nn.Linear(hidden_width, width, bias=False)
        self.w3 = nn.Linear(width, hidden_width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
