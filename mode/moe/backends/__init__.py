"""Ways to compute all experts of a rank on tokens sorted by expert. One file each, one signature.

The native one also takes tokens as they are, if a dispatcher hands them over so.

Which one is used changes neither parameters nor checkpoints nor, but for rounding, results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mode.moe.backends.grouped_mm import grouped_mm_experts
from mode.moe.backends.lack import Lack
from mode.moe.backends.loop import loop_experts
from mode.moe.backends.megablocks import check_megablocks, megablocks_experts
from mode.moe.backends.native import NativeDispatcher, check_native, native_experts
from mode.native.functions import watched
from mode.routing import ExpertRouting

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

PREFERENCE = ("megablocks", "native", "grouped_mm", "loop")  # what "auto" tries, in this order
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def choose_backend(name: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> tuple[str, str]:
    """(the backend that the setting `name` stands for in such a model on this machine, why that one).

    `widths` are those of the model and of an expert. Only a setting that names a backend can be refused: a
    `ConfigError`. "auto" always finds one.
    """
    checks = {"megablocks": check_megablocks, "native": check_native}
    if name != "auto":
        if name in checks:
            checks[name](device, dtype)
        return name, "as configured"
    best, why = ("native", "compiled for this CPU") if device.type == "cpu" else ("megablocks", "it is installed")
    try:
        checks[best](device, dtype)
        return best, why
    except Lack as lack:
        no_best = lack.reason
    no_grouped_mm = _grouped_mm_lack(dtype, widths)
    if no_grouped_mm is None:
        return "grouped_mm", no_best
    return "loop", f"{no_best}; {no_grouped_mm}"


def _grouped_mm_lack(dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    if dtype not in GROUPED_MM_DTYPES:
        return f"grouped_mm knows no {str(dtype).removeprefix('torch.')}"
    odd = next((width for width in widths if width % 8), None)
    return None if odd is None else f"grouped_mm needs widths that are multiples of 8, and one is {odd}"


def auto_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """For a model that may still move: chosen by the tensors themselves. A trainer chooses once, at its start."""
    if x_QD.device.type == "cpu" and watched():
        return loop_experts(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)
    name, _ = choose_backend("auto", x_QD.device, x_QD.dtype, tuple(w1_eFD.shape[1:]))
    return BACKENDS[name](x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


class AutoDispatcher(NativeDispatcher):
    """As `auto_experts`: the native way where that is what "auto" stands for."""

    def mix(self, x_TD: Tensor, routing: ExpertRouting, experts: nn.Module) -> Tensor:
        if watched():
            return self.sort_and_mix(x_TD, routing, experts)
        width = x_TD.shape[1]  # for the native way any will do
        name, _ = choose_backend("auto", x_TD.device, x_TD.dtype, (width,))
        return (super().mix if name == "native" else self.sort_and_mix)(x_TD, routing, experts)


BACKENDS: dict[str, Backend] = {
    "auto": auto_experts,
    "megablocks": megablocks_experts,
    "native": native_experts,
    "grouped_mm": grouped_mm_experts,
    "loop": loop_experts,
}
