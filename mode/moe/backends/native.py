"""The experts of a CPU in compiled code (mode/native/experts.h), tokens and gates included. fp32 and fp64, any width.

Experts are computed side by side, one to a core, on tokens that are gathered where they are used. So with all
experts on this rank nothing has to be dispatched: `NativeDispatcher` hands over tokens and choices as they are.

Compiled at the first use. Without a compiler `auto` takes another backend.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mode.moe.backends.lack import Lack
from mode.moe.backends.loop import loop_experts
from mode.moe.dispatch import LocalDispatcher
from mode.native.functions import DTYPES, mix, watched
from mode.native.library import why_not
from mode.routing import ExpertRouting


def check_native(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, by `Lack`, a model that it cannot compute here; compiles it, if it can."""
    if device.type != "cpu":
        raise Lack("native", f"native experts are for CPUs, and this is a {device.type} device", 'use "auto"')
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise Lack("native", f"native experts are in float32 or float64 and this model is {name}", 'use "auto"')
    missing = why_not()
    if missing is not None:
        raise Lack("native", missing.reason, missing.fix)


def native_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """Rows that are sorted by expert, as from other ranks: tokens of one choice each."""
    if watched():
        return loop_experts(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)
    experts_e = torch.arange(len(counts_e), device=counts_e.device)
    experts_Q1 = experts_e.repeat_interleave(counts_e, output_size=len(x_QD)).unsqueeze(1)
    return mix_tokens(x_QD, experts_Q1, x_QD.new_ones(len(x_QD), 1), w1_eFD, w2_eDF, w3_eFD)


def mix_tokens(
    x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    check_native(x_TD.device, x_TD.dtype)
    return mix(x_TD, choices_TK, gates_TK.to(x_TD.dtype), w1_EFD, w2_EDF, w3_EFD)


class NativeDispatcher(LocalDispatcher):
    def mix(self, x_TD: Tensor, routing: ExpertRouting, experts: nn.Module) -> Tensor:
        if watched():
            return self.sort_and_mix(x_TD, routing, experts)
        processed_TK = routing.choices_TK.where(routing.processed_TK, -1)
        mixed_TD: Tensor = experts(x_TD, processed_TK, routing.gates_TK)
        return mixed_TD
