"""The experts of a CPU in compiled code (native.cpp), tokens and gates included. float32 and float64, any width.

Experts are computed side by side, one to a core, on tokens that are gathered where they are used. So with all
experts on this rank nothing has to be dispatched: `NativeDispatcher` hands over tokens and choices as they are.

Compiled at the first use. Without a compiler `auto` takes another backend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mode.moe.backends.lack import Lack
from mode.moe.backends.loop import loop_experts
from mode.moe.backends.native_library import load_library
from mode.moe.dispatch import LocalDispatcher
from mode.routing import ExpertRouting

DTYPES = (torch.float32, torch.float64)


def check_native(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, by `Lack`, a model that it cannot compute here; compiles it, if it can."""
    if device.type != "cpu":
        raise Lack("native", f"it is for CPUs, and this is a {device.type} device", 'use "auto"')
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise Lack("native", f"it computes in float32 and float64 only and this model is {name}", 'use "auto"')
    load_library()


def mix(x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """The sum of every token's chosen experts, each times its gate. Choices that are no expert add nothing."""
    check_native(x_TD.device, x_TD.dtype)
    mixed_TD: Tensor = _Mix.apply(x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)
    return mixed_TD


def native_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """Rows that are sorted by expert, as from other ranks: tokens of one choice each."""
    if is_in_torch_dispatch_mode():  # a mode that counts operations would not see those in here
        return loop_experts(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)
    experts_e = torch.arange(len(counts_e), device=counts_e.device)
    experts_Q1 = experts_e.repeat_interleave(counts_e, output_size=len(x_QD)).unsqueeze(1)
    return mix(x_QD, experts_Q1, x_QD.new_ones(len(x_QD), 1), w1_eFD, w2_eDF, w3_eFD)


class NativeDispatcher(LocalDispatcher):
    def mix(self, x_TD: Tensor, routing: ExpertRouting, experts: nn.Module) -> Tensor:
        if is_in_torch_dispatch_mode():
            return self.sort_and_mix(x_TD, routing, experts)
        processed_TK = routing.choices_TK.where(routing.processed_TK, -1)
        mixed_TD: Tensor = experts(x_TD, processed_TK, routing.gates_TK)
        return mixed_TD


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
    ) -> Tensor:
        inputs = [each.contiguous() for each in (x_TD, choices_TK, gates_TK.to(x_TD.dtype), w1_EFD, w2_EDF, w3_EFD)]
        mixed_TD, gate_RF, up_RF = torch.ops.deepspeed_mode.mix(*inputs)
        ctx.save_for_backward(*inputs[:3], gate_RF, up_RF, *inputs[3:])
        ctx.gates_dtype = gates_TK.dtype
        return mixed_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_gates_TK, *grad_weights = torch.ops.deepspeed_mode.mix_backward(
            grad_TD.contiguous(), *ctx.saved_tensors
        )
        return grad_x_TD, None, grad_gates_TK.to(ctx.gates_dtype), *grad_weights
