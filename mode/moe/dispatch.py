"""Bringing tokens to experts and their outputs back, on one rank.

Two methods joined by a record. No-op and dropped choices are left out before anything is sorted or
copied; nothing is padded. Knows neither how choices were made nor what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mode.routing import ExpertRouting


@dataclass(frozen=True)
class Dispatched:
    """The processed assignments, sorted by expert; within one expert, by token."""

    x_QD: Tensor  # the tokens' vectors
    counts_e: Tensor  # int64: how many rows belong to each expert of this rank
    tokens_R: Tensor  # int64: the token of each row
    gates_R: Tensor  # float32
    num_tokens: int


class LocalDispatcher:
    """All experts are on this rank."""

    def dispatch(self, x_TD: Tensor, routing: ExpertRouting) -> Dispatched:
        top_k = routing.choices_TK.shape[1]
        assignments_R = routing.processed_TK.flatten().nonzero().squeeze(1)
        experts_R, order_R = routing.choices_TK.flatten()[assignments_R].sort(stable=True)
        assignments_R = assignments_R[order_R]
        tokens_R = assignments_R // top_k
        return Dispatched(
            x_QD=x_TD.index_select(0, tokens_R),
            counts_e=torch.bincount(experts_R, minlength=routing.num_experts),
            tokens_R=tokens_R,
            gates_R=routing.gates_TK.flatten()[assignments_R],
            num_tokens=len(x_TD),
        )

    def combine(self, out_QD: Tensor, sent: Dispatched) -> Tensor:
        """Sums each token's gated expert outputs; a token without any gets exactly zero."""
        gated_RD = out_QD * sent.gates_R.unsqueeze(1)  # float32: a token's K outputs are summed before rounding
        summed_TD = gated_RD.new_zeros(sent.num_tokens, out_QD.shape[1]).index_add(0, sent.tokens_R, gated_RD)
        return summed_TD.to(out_QD.dtype)
