"""The keys and values that one block has computed, to be attended to by later tokens.

A depth-routed block stores those of the tokens it kept, so its rows hold different numbers of them. Keys are
stored turned by their original positions, and slots of a row are in the order of the sequence, so a later token
sees all of them: masking is by length alone. Memory is sized by the fullest row and grows in small chunks.

Knows nothing of routers or of where tokens come from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mode.accounting import cache_slots
from mode.transformer.attention import Grid, attend_causally


class BlockCache:
    """`fill` once with the prompts, then `extend` by a token per row. Both are an `Attend`."""

    def __init__(self, num_rows: int) -> None:
        self.lengths_B = torch.zeros(num_rows, dtype=torch.int64)  # on the CPU, where sizes are decided
        self.keys_BGCH: Tensor | None = None  # None: nothing stored yet
        self.values_BGCH: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What is allocated."""
        return sum(part.nbytes for part in (self.keys_BGCH, self.values_BGCH) if part is not None)

    def fill(self, q_BSNH: Tensor, k_BSGH: Tensor, v_BSGH: Tensor, grid: Grid) -> Tensor:
        """Stores the tokens of the grid, without its fillers, and attends within it."""
        num_rows, num_slots = k_BSGH.shape[:2]
        if grid.valid_BS is None:
            self.lengths_B = torch.full((num_rows,), num_slots)
        else:
            self.lengths_B = grid.valid_BS.sum(dim=1).cpu()
        keys_BGCH, values_BGCH = self._reserve(num_slots, k_BSGH)
        keys_BGCH[:, :, :num_slots] = k_BSGH.transpose(1, 2)  # fillers are behind the length of their row
        values_BGCH[:, :, :num_slots] = v_BSGH.transpose(1, 2)
        return attend_causally(q_BSNH, k_BSGH, v_BSGH, grid)

    def extend(
        self, q_T1NH: Tensor, k_T1GH: Tensor, v_T1GH: Tensor, grid: Grid, rows_T: Tensor | None = None
    ) -> Tensor:
        """Stores one more token in each of the rows `rows_T` (ascending, on the CPU; None: all), which sees its row."""
        if rows_T is not None and len(rows_T) == len(self.lengths_B):
            rows_T = None
        slots_T = self.lengths_B.clone() if rows_T is None else self.lengths_B[rows_T]
        last, ragged = int(slots_T.max()), bool((slots_T != slots_T[0]).any())
        keys_BGCH, values_BGCH = self._reserve(last + 1, k_T1GH)
        keys_TGCH, values_TGCH = keys_BGCH[:, :, : last + 1], values_BGCH[:, :, : last + 1]
        device = k_T1GH.device
        if rows_T is None and not ragged:
            self.lengths_B += 1
            keys_BGCH[:, :, last], values_BGCH[:, :, last] = k_T1GH[:, 0], v_T1GH[:, 0]
        else:
            written_T = torch.arange(len(slots_T)) if rows_T is None else rows_T
            self.lengths_B[written_T] += 1
            index = (written_T.to(device), slice(None), slots_T.to(device))
            keys_BGCH[index], values_BGCH[index] = k_T1GH[:, 0], v_T1GH[:, 0]
        if rows_T is not None:
            keys_TGCH, values_TGCH = _select(keys_TGCH, rows_T), _select(values_TGCH, rows_T)
        mask_T11C = None
        if ragged:
            seen_TC = torch.arange(last + 1) <= slots_T.unsqueeze(1)
            mask_T11C = seen_TC[:, None, None].to(device)
        # The query heads that share keys stand where queries usually do, so keys need not be repeated.
        q_TGXH = q_T1NH.squeeze(1).unflatten(1, (keys_TGCH.shape[1], -1))
        attended_TGXH = F.scaled_dot_product_attention(q_TGXH, keys_TGCH, values_TGCH, attn_mask=mask_T11C)
        return attended_TGXH.flatten(1, 2).unsqueeze(1)

    def keep_rows(self, rows_T: Tensor) -> None:
        """Forgets all other rows; `rows_T` is on the CPU."""
        self.lengths_B = self.lengths_B[rows_T]
        if self.keys_BGCH is not None and self.values_BGCH is not None:
            num_slots = cache_slots(int(self.lengths_B.max()))
            self.keys_BGCH = self.keys_BGCH[:, :, :num_slots].index_select(0, rows_T.to(self.keys_BGCH.device))
            self.values_BGCH = self.values_BGCH[:, :, :num_slots].index_select(0, rows_T.to(self.values_BGCH.device))

    def _reserve(self, longest: int, like_BSGH: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers with room for `longest` slots a row."""
        num_rows, num_slots = len(self.lengths_B), cache_slots(longest)
        if self.keys_BGCH is None or self.values_BGCH is None:
            shape = (num_rows, like_BSGH.shape[2], num_slots, like_BSGH.shape[3])
            # Zeros: what lies behind a row's length is masked, but a NaN times a weight of 0 is a NaN.
            self.keys_BGCH, self.values_BGCH = like_BSGH.new_zeros(shape), like_BSGH.new_zeros(shape)
        more = num_slots - self.keys_BGCH.shape[2]
        if more > 0:
            self.keys_BGCH = F.pad(self.keys_BGCH, (0, 0, 0, more))
            self.values_BGCH = F.pad(self.values_BGCH, (0, 0, 0, more))
        return self.keys_BGCH, self.values_BGCH


def _select(x_BGCH: Tensor, rows_T: Tensor) -> Tensor:
    """Some of the rows; a single one without a copy."""
    return x_BGCH.narrow(0, int(rows_T[0]), 1) if len(rows_T) == 1 else x_BGCH.index_select(0, rows_T.to(x_BGCH.device))
