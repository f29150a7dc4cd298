"""Taking the kept tokens out of the sequence and adding their updates back. Knows no router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def take_tokens(x_BLD: Tensor, kept_BS: Tensor) -> tuple[Tensor, Tensor]:
    """(x, to go on with; the kept tokens of every row, in order)."""
    _, length, width = x_BLD.shape
    x_TD, kept_RD = _Take.apply(x_BLD.flatten(0, 1), flat_index(kept_BS, length).flatten())
    return x_TD.view_as(x_BLD), kept_RD.view(*kept_BS.shape, width)


class _Take(torch.autograd.Function):
    """Both uses of x in one, so that backward adds the kept tokens' gradients in place of filling a grid with zeros."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_R: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index_R)
        return x_TD.view_as(x_TD), x_TD.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor, grad_RD: Tensor) -> tuple[Tensor, None]:
        (index_R,) = ctx.saved_tensors
        return grad_TD.index_add(0, index_R, grad_RD), None


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
