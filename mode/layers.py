"""Small parts that more than one package builds on. Knows nothing of routing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def at_least_float32(x: Tensor) -> Tensor:
    """Routers and losses work in float32 whatever the model's precision; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class SwiGLU(nn.Module):
    """The gated feed-forward: w2 (silu(w1 x) * w3 x)."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden_width, bias=False)
        self.w2 = nn.Linear(hidden_width, width, bias=False)
        self.w3 = nn.Linear(width, hidden_width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
