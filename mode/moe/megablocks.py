"""The experts on MegaBlocks: its grouped path and its permutation ops. The one file that imports the package.

MegaBlocks' sparse path is refused on Triton from 3.2 on, so this is its other one: `gmm` of `grouped_gemm`, a
matrix product per expert, on the weights as they are. The kernels are CUDA and bfloat16 only. Nothing is imported
before it is used; without the packages, or with broken ones, the reason is an `Unavailable`.

Knows nothing of other backends but the reference, and not when this one is chosen.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mode.moe.dispatch import Dispatched, LocalDispatcher
from mode.ops.library import Unavailable
from mode.ops.swiglu import loop_experts
from mode.records import ExpertRouting

INSTALL = "pip install --no-deps --no-build-isolation megablocks==0.10.0 grouped_gemm==0.3.0 (docs/gpu.md)"
MAX_OFFSET = 2**31  # MegaBlocks' kernels count elements in 32 bits


# ---------------------------------------------------------------------------------------------------
# What the machine has


@dataclass(frozen=True)
class _Package:
    ops: Any  # megablocks.ops
    gmm: Callable[..., Tensor]  # of grouped_gemm


@functools.cache
def _package() -> _Package:
    """The package, or `Unavailable`."""
    _check_installed()
    try:
        importlib.import_module("grouped_gemm")  # MegaBlocks itself hides why this failed
        ops = importlib.import_module("megablocks.ops")
        return _Package(ops, importlib.import_module("megablocks.grouped_gemm_util").ops.gmm)
    except Exception as error:  # a package built for another torch or CUDA fails in many ways
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unavailable(
            f"megablocks cannot be imported ({reason})", f'build it again: {INSTALL}, or use "auto"'
        ) from error


def check_megablocks(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, by `Unavailable`, a model that MegaBlocks cannot compute here. Imports it last."""
    _check_installed()
    if device.type != "cuda":
        raise Unavailable(f"megablocks needs a CUDA GPU and this is a {device.type} device", 'use "auto"')
    _check_dtype(dtype)
    _package()


def _check_installed() -> None:
    for name in ("megablocks", "grouped_gemm"):
        if not _is_installed(name):
            raise Unavailable(f"{name} is not installed", f'{INSTALL}, or use "auto"')


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module that somebody put in its place has no specification
        return False


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise Unavailable(
            f"megablocks computes in bfloat16 only and this model is {name}", 'enable bf16, or use "auto"'
        )


def _named_package(dtype: torch.dtype) -> _Package:
    """The package for a layer whose setting names it: without it, that setting is the error."""
    try:
        _check_dtype(dtype)
        return _package()
    except Unavailable as why:
        raise why.for_setting("megablocks") from why


# ---------------------------------------------------------------------------------------------------
# The experts


def megablocks_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """As MegaBlocks' `GroupedGLU`, whose second weight is laid out the other way round."""
    gmm = _named_package(x_QD.dtype).gmm
    if not len(x_QD):  # no work for a kernel; the reference gives every weight its zero gradient
        return loop_experts(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)
    sizes_e = counts_e.cpu()  # the one wait for the device: cuBLAS is told the sizes by the host
    gate_QF = gmm(x_QD, w1_eFD, sizes_e, trans_b=True)
    up_QF = gmm(x_QD, w3_eFD, sizes_e, trans_b=True)
    return gmm(F.silu(gate_QF) * up_QF, w2_eDF, sizes_e, trans_b=True)


# ---------------------------------------------------------------------------------------------------
# The permutation


@dataclass(frozen=True)
class Permuted(Dispatched):
    """What MegaBlocks' scatter needs beside the rows."""

    num_tokens: int
    order_A: Tensor  # int32: the assignment of each row
    experts_A: Tensor  # int32: the expert of each row
    ends_E: Tensor  # int32: where each expert's rows end
    gates_A: Tensor  # float32, by assignment, not by row


class MegaBlocksDispatcher(LocalDispatcher):
    """`LocalDispatcher` by MegaBlocks' sort, histogram, gather and scatter, for when every choice is processed.

    They know no choice without an expert: all T x K are copied. In exchange nothing waits for the device, and
    backward adds up a token's gradients without atomics, in a fixed order.
    """

    def dispatch(self, x_TD: Tensor, routing: ExpertRouting) -> Dispatched:
        top_k = routing.choices_TK.shape[1]
        if not 0 < x_TD.numel() * top_k < MAX_OFFSET:
            return super().dispatch(x_TD, routing)
        ops = _named_package(x_TD.dtype).ops
        choices_A = routing.choices_TK.flatten().int()
        experts_A, order_A = ops.sort(choices_A, max(1, (routing.num_experts - 1).bit_length()))
        counts_E = ops.histogram(choices_A, routing.num_experts)
        ends_E = ops.inclusive_cumsum(counts_E, 0).view(-1)  # of one expert it would be a scalar
        gates_A = routing.gates_TK.flatten()
        return Permuted(
            x_QD=ops.gather(x_TD.contiguous(), order_A, experts_A, ends_E, top_k),
            counts_e=counts_E.long(),
            num_tokens=len(x_TD),
            order_A=order_A,
            experts_A=experts_A,
            ends_E=ends_E,
            gates_A=gates_A,
        )

    def combine(self, out_QD: Tensor, sent: Dispatched) -> Tensor:
        if not isinstance(sent, Permuted):
            return super().combine(out_QD, sent)
        top_k = len(sent.order_A) // sent.num_tokens
        summed_TD = _package().ops.scatter(  # float32: a token's K outputs are summed before rounding
            out_QD.float(), sent.order_A, sent.experts_A, sent.gates_A, sent.ends_E, top_k
        )
        return summed_TD.to(out_QD.dtype)
