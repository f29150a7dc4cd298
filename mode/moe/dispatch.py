"""Bringing tokens to experts and their outputs back, on one rank.

`mix` is two methods joined by a record, with the experts between them. No-op and dropped choices are left out before
anything is sorted or copied; nothing is padded. Both directions are gathers, forward and backward: a token's rows are
known, so nothing is ever scattered. Knows neither how choices were made nor what an expert computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.layers import at_least_float32
from mode.routing import ExpertRouting


@dataclass(frozen=True)
class Rows:
    """Which token every row of the experts' order belongs to, and which rows a token has. All int64."""

    tokens_R: Tensor  # the token of each row
    rows_R: Tensor  # the rows of all tokens, token after token
    starts_T: Tensor  # where a token's rows begin in `rows_R`


@dataclass(frozen=True)
class Dispatched:
    """What the experts of this rank get, sorted by expert. A dispatcher adds what it needs for the way back."""

    x_QD: Tensor  # the tokens' vectors
    counts_e: Tensor  # int64: how many rows belong to each expert of this rank


@dataclass(frozen=True)
class Sorted(Dispatched):
    """The processed assignments, sorted by expert; within one expert, by token."""

    gates_R: Tensor  # float32
    rows: Rows


class LocalDispatcher:
    """All experts are on this rank.

    Where `all_processed`, without no-ops and capacity, there are T x K rows, and nothing waits for the device.
    Otherwise it must be asked how many there are.
    """

    def __init__(self, all_processed: bool = False) -> None:
        self.find: Callable[[ExpertRouting], Tensor] = _all_of_them if all_processed else _processed_ones

    def mix(self, x_TD: Tensor, routing: ExpertRouting, experts: nn.Module) -> Tensor:
        """[T, D]: what the experts make of each token's choices, added up."""
        return self.sort_and_mix(x_TD, routing, experts)

    def sort_and_mix(self, x_TD: Tensor, routing: ExpertRouting, experts: nn.Module) -> Tensor:
        sent = self.dispatch(x_TD, routing)
        return self.combine(experts(sent.x_QD, sent.counts_e), sent)

    def dispatch(self, x_TD: Tensor, routing: ExpertRouting) -> Dispatched:
        return self.sort(x_TD, routing)

    def sort(self, x_TD: Tensor, routing: ExpertRouting) -> Sorted:
        top_k = routing.choices_TK.shape[1]
        assignments_R = self.find(routing)
        experts_R, order_R = routing.choices_TK.flatten().index_select(0, assignments_R).sort(stable=True)
        assignments_R = assignments_R.index_select(0, order_R)
        counts_T = routing.processed_TK.sum(dim=1)
        rows = Rows(assignments_R // top_k, inverse(order_R), counts_T.cumsum(0) - counts_T)
        return Sorted(
            x_QD=gather_rows(x_TD, rows),
            counts_e=_counts(experts_R, routing.num_experts),
            gates_R=routing.gates_TK.flatten().index_select(0, assignments_R),
            rows=rows,
        )

    def combine(self, out_QD: Tensor, sent: Dispatched) -> Tensor:
        """Sums each token's gated expert outputs; a token without any gets exactly zero."""
        assert isinstance(sent, Sorted)
        return sum_rows(out_QD, sent.gates_R, sent.rows)


def _all_of_them(routing: ExpertRouting) -> Tensor:
    return torch.arange(routing.choices_TK.numel(), device=routing.choices_TK.device)


def _processed_ones(routing: ExpertRouting) -> Tensor:
    return routing.processed_TK.flatten().nonzero().squeeze(1)


def _counts(experts_R: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert has, of sorted ones. `bincount` would wait for the device to learn the largest."""
    edges_E = torch.arange(num_experts + 1, device=experts_R.device)
    return torch.searchsorted(experts_R, edges_E).diff()


def inverse(order_R: Tensor) -> Tensor:
    """Where each element went."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def gather_rows(x_TD: Tensor, rows: Rows) -> Tensor:
    """[R, D]: every row's token."""
    gathered_RD: Tensor = _GatherRows.apply(x_TD, rows)
    return gathered_RD


def sum_rows(x_RD: Tensor, gates_R: Tensor, rows: Rows) -> Tensor:
    """[T, D]: the sum of every token's rows, each times its gate."""
    summed_TD: Tensor = _SumRows.apply(x_RD, gates_R, rows)
    return summed_TD


def permute(x_RD: Tensor, order_R: Tensor) -> Tensor:
    """The rows in another order."""
    permuted_RD: Tensor = _Permute.apply(x_RD, order_R)
    return permuted_RD


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x_TD.index_select(0, rows.tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _bags(grad_RD, ctx.rows.rows_R, ctx.rows.starts_T), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, gates_R: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.save_for_backward(x_RD, gates_R)
        return _bags(x_RD, rows.rows_R, rows.starts_T, gates_R.index_select(0, rows.rows_R))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, gates_R = ctx.saved_tensors
        tokens_R, grad_TD = ctx.rows.tokens_R, grad_TD.contiguous()
        each_R = torch.arange(len(tokens_R), device=tokens_R.device)  # every row a bag of its own
        grad_x_RD = _bags(grad_TD, tokens_R, each_R, gates_R)
        grad_gates_R = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            at_least_float32(x_RD), at_least_float32(grad_TD), tokens_R, each_R, each_R, 0
        )
        return grad_x_RD, grad_gates_R.to(gates_R.dtype), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.order_R = order_R
        return x_RD.index_select(0, order_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return grad_RD.index_select(0, inverse(ctx.order_R)), None


def _bags(x_XD: Tensor, rows_A: Tensor, starts_Y: Tensor, weights_A: Tensor | None = None) -> Tensor:
    """[Y, D]: sums of the rows of x that are listed in `rows_A`, bag after bag, each times its weight.

    Torch's embedding bag is just that: several times faster than adding rows, and than a gather and a product. In
    float32 at least, rounded once: of bfloat16 rows torch's sum on a CPU is off by more than a rounding.
    """
    exact_XD = at_least_float32(x_XD).detach()  # else it would also make what torch's own backward needs
    weights_A = None if weights_A is None else weights_A.to(exact_XD.dtype)
    summed_YD = F.embedding_bag(rows_A, exact_XD, starts_Y, mode="sum", per_sample_weights=weights_A)
    return summed_YD.to(x_XD.dtype)
