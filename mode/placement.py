"""Where the tokens of a [B, S] grid stand: positions, rotary tables, document mask.

A depth-routed block sees fewer tokens than the sequence has. Its `Placement` is taken from the whole
sequence's, so kept tokens carry their original positions and documents with them. Slots of a row are
in ascending order of position, so "slot i may see slot j <= i" is the causal mask.

Knows nothing of routers or experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """A grid in which every row has S tokens."""

    positions_BS: Tensor  # int64, ascending in every row
    cos_BSH: Tensor  # rotary tables of those positions, H / 2 wide
    sin_BSH: Tensor
    documents_BS: Tensor | None  # int64; None: a row is one document
    mask_B1SS: Tensor | None  # bool, True where slot i may see slot j; None: plain causal

    @staticmethod
    def of_sequence(positions_BL: Tensor, cos_BLH: Tensor, sin_BLH: Tensor, documents_BL: Tensor | None) -> Placement:
        return Placement(positions_BL, cos_BLH, sin_BLH, documents_BL, _document_mask(documents_BL))

    def take(self, kept_BS: Tensor, valid_BS: Tensor | None) -> Placement:
        """The placement of the chosen slots. Rotary tables and documents are gathered, not recomputed."""
        rotary_BSH = kept_BS.unsqueeze(-1).expand(-1, -1, self.cos_BSH.shape[-1])
        documents_BS = None if self.documents_BS is None else self.documents_BS.gather(1, kept_BS)
        taken = (
            self.positions_BS.gather(1, kept_BS),
            self.cos_BSH.gather(1, rotary_BSH),
            self.sin_BSH.gather(1, rotary_BSH),
            documents_BS,
            _document_mask(documents_BS),
        )
        return Placement(*taken) if valid_BS is None else RaggedPlacement(*taken, valid_BS)

    def rows(self, rows_T: Tensor) -> Placement:
        """The placement of some rows of a grid without documents."""
        assert self.documents_BS is None
        return Placement(self.positions_BS[rows_T], self.cos_BSH[rows_T], self.sin_BSH[rows_T], None, None)

    @property
    def present_BS(self) -> Tensor | None:
        """bool, False at fillers; None: there are none."""
        return None

    def flatten(self, x_BSD: Tensor) -> Tensor:
        """The tokens of the grid as one list, row after row."""
        return x_BSD.flatten(0, 1)

    def unflatten(self, x_TD: Tensor) -> Tensor:
        """The grid again; `flatten`'s inverse."""
        return x_TD.unflatten(0, self.positions_BS.shape)


@dataclass(frozen=True)
class RaggedPlacement(Placement):
    """A grid whose rows hold different numbers of tokens, each row filled up at its end.

    Fillers stand behind every token of their row, so the causal mask hides them from the tokens. They
    are left out of `flatten`, so no feed-forward sees them, and `unflatten` puts zeros in their place.
    """

    valid_BS: Tensor  # bool, False at fillers

    @property
    def present_BS(self) -> Tensor | None:
        return self.valid_BS

    def flatten(self, x_BSD: Tensor) -> Tensor:
        return x_BSD[self.valid_BS]

    def unflatten(self, x_TD: Tensor) -> Tensor:
        x_BSD = x_TD.new_zeros(*self.valid_BS.shape, *x_TD.shape[1:])
        return x_BSD.index_put((self.valid_BS,), x_TD)


def _document_mask(documents_BS: Tensor | None) -> Tensor | None:
    if documents_BS is None:
        return None
    same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return torch.tril(same_BSS).unsqueeze(1)
