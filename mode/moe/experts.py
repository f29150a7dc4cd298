"""The stacked weights of the real experts. No-ops own nothing here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mode.moe.backends import BACKENDS
from mode.moe.backends.native import mix_tokens


class Experts(nn.Module):
    """Experts `first` .. `first + num_local - 1`, each a SwiGLU; `backend` computes them."""

    def __init__(self, num_local: int, width: int, hidden_width: int, backend: str, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.compute = BACKENDS[backend]
        self.w1 = nn.Parameter(torch.empty(num_local, hidden_width, width))
        self.w2 = nn.Parameter(torch.empty(num_local, width, hidden_width))
        self.w3 = nn.Parameter(torch.empty(num_local, hidden_width, width))

    def forward(self, x_XD: Tensor, rows: Tensor, gates_TK: Tensor | None = None) -> Tensor:
        """Rows sorted by expert, `rows` how many each has; or, with gates, tokens, `rows` their choices [T, K].

        Both in here, because ZeRO-3 gathers a module's weights when it is called.
        """
        if gates_TK is None:
            return self.compute(x_XD, rows, self.w1, self.w2, self.w3)
        return mix_tokens(x_XD, rows, gates_TK, self.w1, self.w2, self.w3)
