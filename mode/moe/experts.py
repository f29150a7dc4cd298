"""The stacked weights of the real experts. No-ops own nothing here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mode.moe.backends import BACKENDS


class Experts(nn.Module):
    """Experts `first` .. `first + num_local - 1`, each a SwiGLU; `backend` computes them."""

    def __init__(self, num_local: int, width: int, hidden_width: int, backend: str, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.compute = BACKENDS[backend]
        self.w1 = nn.Parameter(torch.empty(num_local, hidden_width, width))
        self.w2 = nn.Parameter(torch.empty(num_local, width, hidden_width))
        self.w3 = nn.Parameter(torch.empty(num_local, hidden_width, width))

    def forward(self, x_QD: Tensor, counts_e: Tensor) -> Tensor:
        return self.compute(x_QD, counts_e, self.w1, self.w2, self.w3)
