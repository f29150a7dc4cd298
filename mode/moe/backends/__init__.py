"""Ways to compute all experts of a rank on tokens sorted by expert. One file each, one signature."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mode.moe.backends.grouped_mm import grouped_mm_experts
from mode.moe.backends.loop import loop_experts

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

BACKENDS: dict[str, Backend] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}
