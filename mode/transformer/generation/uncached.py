"""The reference for decoding: the whole causal forward pass of every row again for every token.

Slow and obviously right. Every rank enters every block, so it serves models that are spread over ranks, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mode.transformer.generation.prompts import Prompts

if TYPE_CHECKING:
    from mode.transformer.model import ModeTransformer


class UncachedDecoder:
    """As `CachedDecoder`, one row after the other, without padding."""

    def __init__(self, model: ModeTransformer, prompts: Prompts, method: str) -> None:
        self.model, self.method = model, method
        self.rows = [ids_L[:length] for ids_L, length in zip(prompts.ids_BL, prompts.lengths_B.tolist(), strict=True)]

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Logits [B, V] after all tokens so far."""
        return torch.cat([self.model(ids_L.unsqueeze(0), causal=self.method).logits[:, -1] for ids_L in self.rows])

    def step(self, ids_B: Tensor) -> Tensor:
        """Logits [B, V] after one more token per row."""
        self.rows = [torch.cat([ids_L, id_1]) for ids_L, id_1 in zip(self.rows, ids_B.split(1), strict=True)]
        return self.prefill()

    def keep_rows(self, rows_T: Tensor) -> None:
        """Goes on with some of the rows."""
        self.rows = [self.rows[row] for row in rows_T.tolist()]
