"""Taking the kept tokens out of the sequence and adding their updates back. Knows no router."""

from __future__ import annotations

from torch import Tensor


def gather_tokens(x_BLD: Tensor, kept_BS: Tensor) -> Tensor:
    """The kept tokens of every row, in order."""
    _, length, width = x_BLD.shape
    return x_BLD.flatten(0, 1).index_select(0, flat_index(kept_BS, length).flatten()).view(*kept_BS.shape, width)


def add_to_tokens(x_BLD: Tensor, index_T: Tensor, update_TD: Tensor) -> Tensor:
    """x with each update added to its token; the tokens not named are bit-identical copies.

    `index_T` counts tokens over the whole batch (`flat_index`) and names each at most once, so the
    addition is deterministic on every device.
    """
    return x_BLD.flatten(0, 1).index_add(0, index_T, update_TD).view_as(x_BLD)


def flat_index(kept_BS: Tensor, length: int) -> Tensor:
    """Positions within a row as positions within the whole batch."""
    starts_B = length * kept_BS.new_ones(kept_BS.shape[0]).cumsum(0) - length
    return kept_BS + starts_B.unsqueeze(1)
