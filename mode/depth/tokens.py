"""Scoring the tokens of a sequence, taking the kept ones out and adding their updates back.

A pass over all tokens costs a routed block as much as computing with some of them. So what uses the sequence hands it
on, and backward adds to its gradient in passing. Knows nothing of how tokens are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import at_least_float32
from mode.native import functions as native


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


def score_and_take(
    x_BLD: Tensor, weight_1D: Tensor, keep: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, to go on with; the scores of all tokens [B, L], in float32; which of them `keep` keeps [B, S]; those)."""
    taken: tuple[Tensor, Tensor, Tensor, Tensor] = _ScoreAndTake.apply(x_BLD, weight_1D, keep)
    return taken


class _ScoreAndTake(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BLD: Tensor, weight_1D: Tensor, keep: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores_BL = F.linear(at_least_float32(x_BLD), at_least_float32(weight_1D)).squeeze(-1)
        kept_BS = keep(scores_BL)
        index_R = flat_index(kept_BS, x_BLD.shape[1]).flatten()
        kept_BSD = x_BLD.flatten(0, 1).index_select(0, index_R).view(*kept_BS.shape, x_BLD.shape[-1])
        ctx.mark_non_differentiable(kept_BS)
        ctx.save_for_backward(x_BLD, weight_1D, index_R)
        return x_BLD.view_as(x_BLD), scores_BL, kept_BS, kept_BSD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_BLD: Tensor, grad_scores_BL: Tensor, _: None, grad_BSD: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x_BLD, weight_1D, index_R = ctx.saved_tensors
        grad_TD, x_TD, weight_D = grad_BLD.flatten(0, 1), x_BLD.flatten(0, 1), weight_1D[0]
        grad_scores_T = grad_scores_BL.flatten()
        if native.takes(grad_TD, grad_scores_T, x_TD, weight_D):
            grad_x_TD, grad_weight_D = native.score_backward(grad_TD, grad_scores_T, x_TD, weight_D)
        else:
            with torch.autocast(x_BLD.device.type, enabled=False):
                grad_x_TD = torch.addmm(
                    at_least_float32(grad_TD), grad_scores_T.unsqueeze(1), at_least_float32(weight_1D)
                ).to(grad_TD.dtype)
                grad_weight_D = (grad_scores_T.unsqueeze(0) @ at_least_float32(x_TD))[0].to(weight_D.dtype)
        grad_x_TD.index_add_(0, index_R, grad_BSD.flatten(0, 1))
        return grad_x_TD.view_as(x_BLD), grad_weight_D.unsqueeze(0), None


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
