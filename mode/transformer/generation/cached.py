"""Decoding with a key/value cache: the prompts once, then one token per row at a time.

What a token costs does not depend on how many came before, apart from attention's reading of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mode.moe.experts import StackedExperts
from mode.transformer.attention import Grid, rope_tables
from mode.transformer.cache import BlockCache
from mode.transformer.generation.prompts import Prompts

if TYPE_CHECKING:
    from mode.transformer.model import ModeTransformer


class CachedDecoder:
    """The logits of the next token of every row, given the prompts and then token by token."""

    def __init__(self, model: ModeTransformer, prompts: Prompts, method: str) -> None:
        _check_whole(model)
        num_rows, device = len(prompts.ids_BL), prompts.ids_BL.device
        self.model, self.prompts, self.method = model, prompts, method
        self.blocks: list[Any] = list(model.blocks)
        self.caches = [BlockCache(num_rows) for _ in self.blocks]
        self.positions_B = prompts.lengths_B.to(device)  # of the next token
        self.sample_keys_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        config = model.config.model
        positions_1L = torch.arange(config.sequence_length, device=device).unsqueeze(0)
        cos_1LH, sin_1LH = rope_tables(positions_1L, config.head_width, config.rope_theta, model.embedding.weight.dtype)
        self.cos_LH, self.sin_LH = cos_1LH[0], sin_1LH[0]

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """Logits [B, V] after the prompts. The blocks' caches take what they kept."""
        ids_BL, present_BL = self.prompts.ids_BL, self.prompts.present_BL
        num_rows, length = ids_BL.shape
        x_BLD = self.model.embed(ids_BL)
        grid = self.model.place(num_rows, length, None, x_BLD)
        if present_BL is not None:
            grid = grid.take(grid.positions_BS, present_BL)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x_BLD = block.prefill(x_BLD, grid, self.sample_keys_B, self.method, cache)
        rows_B = torch.arange(num_rows, device=ids_BL.device)
        return self.model.read_out(x_BLD[rows_B, self.positions_B - 1])

    @torch.inference_mode()
    def step(self, ids_B: Tensor) -> Tensor:
        """Logits [B, V] after one more token per row."""
        positions_B1 = self.positions_B.unsqueeze(1)
        grid = Grid(positions_B1, self.cos_LH[positions_B1], self.sin_LH[positions_B1])
        x_B1D = self.model.embed(ids_B.unsqueeze(1))
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x_B1D = block.step(x_B1D, grid, self.sample_keys_B, self.method, cache)
        self.positions_B = self.positions_B + 1
        return self.model.read_out(x_B1D[:, 0])

    def keep_rows(self, rows_T: Tensor) -> None:
        """Goes on with some of the rows; `rows_T` is on the CPU."""
        index_T = rows_T.to(self.positions_B.device)
        self.positions_B, self.sample_keys_B = self.positions_B[index_T], self.sample_keys_B[index_T]
        for cache in self.caches:
            cache.keep_rows(rows_T)

    @property
    def num_bytes(self) -> int:
        """What the caches of all blocks have allocated."""
        return sum(cache.num_bytes for cache in self.caches)


def _check_whole(model: ModeTransformer) -> None:
    """Refuses a model spread over ranks: its blocks are collectives, and a rank that skips one hangs the others."""
    experts = model.config.experts
    parts = [module for module in model.modules() if isinstance(module, StackedExperts)]
    spread = experts is not None and any(len(part.w1) != experts.num_experts for part in parts)
    if spread or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # ds_id: ZeRO stage 3
        what = f"experts.ep_size = {experts.ep_size}" if spread and experts is not None else "ZeRO stage 3"
        raise ValueError(
            f"use_cache is True, but {what} spreads this model over ranks, which must all enter every block; "
            "set use_cache to False, or export the model (tools/export.py) and load it in one process"
        )
