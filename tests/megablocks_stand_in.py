"""What MegaBlocks needs compiled, in torch: so that its own Python and Triton code runs without a GPU.

`megablocks_ops` and `grouped_gemm` are CUDA extensions. These stand-ins have their signatures and refuse what they
refuse, but for the device. Triton's kernels are MegaBlocks' own, interpreted: set TRITON_INTERPRET=1 beforehand.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

calls: list[str] = []  # the stand-ins' functions, in the order they were called


def install() -> None:
    """Puts the stand-ins where `import` finds them, and limits every Triton kernel to one tuning."""
    ops = _module("megablocks_ops")
    for function in (histogram, sort, inclusive_cumsum, exclusive_cumsum):
        setattr(ops, function.__name__, function)
    grouped_gemm: Any = _module("grouped_gemm")
    grouped_gemm.ops, grouped_gemm.backend = _module("grouped_gemm.ops"), _module("grouped_gemm.backend")
    grouped_gemm.ops.gmm, grouped_gemm.backend.gmm = gmm, product

    from megablocks.backend import kernels

    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]  # there is nothing to tune, and no device to time it on


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module
    return module


# ---------------------------------------------------------------------------------------------------
# megablocks_ops


def histogram(x: Tensor, num_bins: int) -> Tensor:
    calls.append("histogram")
    return torch.bincount(x.long(), minlength=int(num_bins)).int()


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    """By the lowest `end_bit` bits, as a radix sort."""
    calls.append("sort")
    order = (x & ((1 << end_bit) - 1)).sort(stable=True).indices
    x_out.copy_(x[order])
    iota_out.copy_(order)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    calls.append("inclusive_cumsum")
    out.copy_(x.cumsum(dim))


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    out.copy_(x.cumsum(dim) - x)


# ---------------------------------------------------------------------------------------------------
# grouped_gemm


def product(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    """Of `grouped_gemm.backend`: one product per expert."""
    calls.append("gmm")
    assert a.dtype == b.dtype == torch.bfloat16 and a.is_contiguous() and b.is_contiguous()
    assert batch_sizes.device.type == "cpu" and batch_sizes.dtype == torch.int64 and batch_sizes.ndim == 1
    assert len(a) == batch_sizes.sum() and not (trans_a and trans_b)
    parts = a.split(batch_sizes.tolist())
    if trans_a:
        out = torch.stack([x.T @ y for x, y in zip(parts, b.split(batch_sizes.tolist()), strict=True)])
    else:
        out = torch.cat([x @ (w.T if trans_b else w) for x, w in zip(parts, b, strict=True)])
    return out if c is None else c.copy_(out)


class GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return product(a, b, batch_sizes, trans_b=trans_b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b, batch_sizes = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        left, right = (gradient, a) if ctx.trans_b else (a, gradient)
        for_a = product(gradient, b, batch_sizes, trans_b=not ctx.trans_b)
        return for_a, product(left, right, batch_sizes, trans_a=True), None, None


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """Of `grouped_gemm.ops`: the same with gradients."""
    return GroupedGemm.apply(a, b, batch_sizes, trans_b)
