"""Rows sorted by expert: which token each belongs to, and moving vectors between tokens and rows.

No-op and dropped choices have no row, and nothing is padded. Both directions are gathers, forward and backward: a
token's rows are known, so nothing is ever scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def at_least_float32(x: Tensor) -> Tensor:
    """Routers and losses work in float32 whatever the model's precision; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_functional() -> bool:
    """Whether torch.func is at work, which cannot look into an autograd function of this package."""
    return torch._C._are_functorch_transforms_active()


@dataclass(frozen=True)
class Rows:
    """The processed assignments, sorted by expert; within one expert, by token. All int64."""

    assignments_R: Tensor  # token * K + choice of each row
    tokens_R: Tensor  # the token of each row
    rows_R: Tensor  # the rows of all tokens, token after token
    starts_T: Tensor  # where a token's rows begin in `rows_R`
    counts_E: Tensor  # how many rows each expert has


def sort_by_expert(choices_TK: Tensor, processed_TK: Tensor | None, num_experts: int) -> Rows:
    """The rows of the choices that `processed_TK` marks. None: of all, and nothing waits for the device.

    Otherwise the device must be asked how many rows there are.
    """
    top_k, device = choices_TK.shape[1], choices_TK.device
    if processed_TK is None:
        assignments_R = torch.arange(choices_TK.numel(), device=device)
        counts_T = torch.full((len(choices_TK),), top_k, device=device)
    else:
        assignments_R = processed_TK.flatten().nonzero().squeeze(1)
        counts_T = processed_TK.sum(dim=1)
    experts_R, order_R = choices_TK.flatten().index_select(0, assignments_R).sort(stable=True)
    assignments_R = assignments_R.index_select(0, order_R)
    # `bincount` would wait for the device to learn the largest.
    edges_E = torch.arange(num_experts + 1, device=device)
    counts_E = torch.searchsorted(experts_R, edges_E).diff()
    return Rows(assignments_R, assignments_R // top_k, inverse(order_R), counts_T.cumsum(0) - counts_T, counts_E)


def inverse(order_R: Tensor) -> Tensor:
    """Where each element went."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def gather_rows(x_TD: Tensor, rows: Rows) -> Tensor:
    """[R, D]: every row's token."""
    if is_functional():
        return x_TD.index_select(0, rows.tokens_R)
    gathered_RD: Tensor = _GatherRows.apply(x_TD, rows)
    return gathered_RD


def sum_rows(x_RD: Tensor, gates_R: Tensor, rows: Rows) -> Tensor:
    """[T, D]: the sum of every token's rows, each times its gate; of none, exactly zero."""
    if is_functional():
        gated_RD = (x_RD * gates_R.unsqueeze(1)).to(x_RD.dtype)
        return x_RD.new_zeros(len(rows.starts_T), x_RD.shape[1]).index_add(0, rows.tokens_R, gated_RD)
    summed_TD: Tensor = _SumRows.apply(x_RD, gates_R, rows)
    return summed_TD


def permute(x_RD: Tensor, order_R: Tensor) -> Tensor:
    """The rows in another order."""
    if is_functional():
        return x_RD.index_select(0, order_R)
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
