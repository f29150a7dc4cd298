"""Ways to compute all experts of a rank on tokens sorted by expert. One file each, one signature.

Which one is used changes neither parameters nor checkpoints nor, but for rounding, results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mode.moe.backends.grouped_mm import grouped_mm_experts
from mode.moe.backends.loop import loop_experts
from mode.moe.backends.megablocks import Lack, check_usable, megablocks_experts
from mode.moe.backends.threads import check_device, threads_experts

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

PREFERENCE = ("megablocks", "threads", "grouped_mm", "loop")  # what "auto" tries, in this order
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> tuple[str, str]:
    """(the backend that the setting `name` stands for in such a model on this machine, why that one).

    `widths` are those of the model and of an expert. Only a setting that names a backend can be refused: a
    `ConfigError`. "auto" always finds one.
    """
    if name == "threads":
        check_device(device)
    if name == "auto" and device.type == "cpu" and torch.get_num_threads() > 1:
        return "threads", f"a CPU, {torch.get_num_threads()} threads"
    return _by_packages(name, device, dtype, widths)


@functools.cache
def _by_packages(name: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> tuple[str, str]:
    if name not in ("auto", "megablocks"):
        return name, "as configured"
    try:
        check_usable(device, dtype)
        return "megablocks", "as configured" if name == "megablocks" else "it is installed"
    except Lack as lack:
        if name == "megablocks":
            raise
        no_megablocks = lack.reason
    no_grouped_mm = _grouped_mm_lack(dtype, widths)
    if no_grouped_mm is None:
        return "grouped_mm", no_megablocks
    return "loop", f"{no_megablocks}; {no_grouped_mm}"


def _grouped_mm_lack(dtype: torch.dtype, widths: tuple[int, ...]) -> str | None:
    if dtype not in GROUPED_MM_DTYPES:
        return f"grouped_mm knows no {str(dtype).removeprefix('torch.')}"
    odd = next((width for width in widths if width % 8), None)
    return None if odd is None else f"grouped_mm needs widths that are multiples of 8, and one is {odd}"


def auto_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """For a model that may still move: chosen by the tensors themselves. A trainer chooses once, at its start.

    Without gradients it is mostly for sampling, with fewer tokens than experts. On a CPU the loop is best at that: it
    leaves out the experts that have none and has no threads to wake.
    """
    if x_QD.device.type == "cpu" and not torch.is_grad_enabled():
        return loop_experts(x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)
    name, _ = choose_backend("auto", x_QD.device, x_QD.dtype, tuple(w1_eFD.shape[1:]))
    return BACKENDS[name](x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


BACKENDS: dict[str, Backend] = {
    "auto": auto_experts,
    "megablocks": megablocks_experts,
    "threads": threads_experts,
    "grouped_mm": grouped_mm_experts,
    "loop": loop_experts,
}
