"""How fast a run is: the work done since the last look, over the time it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import distributed

from mode.training.loop.engine import peak_flops, peak_memory


class Clock:
    """Runs from its making, at `position` (step, tokens, FLOPs)."""

    def __init__(self, position: Mapping[str, int], precision: str, device: torch.device) -> None:
        self.started = self.last = time.perf_counter()
        self.position, self.device = position, device
        self.peak_flops = peak_flops(precision)

    def seconds(self) -> float:
        """Of everything, from the start."""
        return time.perf_counter() - self.started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count for `figures`: evaluation and saving."""
        before = time.perf_counter()
        yield
        self.last += time.perf_counter() - before

    def figures(self, position: Mapping[str, int]) -> dict[str, float]:
        """Since the last call; the peak of memory is of the whole process. A collective."""
        now = time.perf_counter()
        seconds = now - self.last
        done = {name: position[name] - self.position[name] for name in position}
        self.last, self.position = now, position
        values = {
            "perf/tokens_per_second": done["tokens"] / seconds,
            "perf/flops_per_second": done["flops"] / seconds,
            "perf/step_seconds": seconds / done["step"],
            "perf/peak_memory_bytes": peak_memory(self.device),
        }
        if self.peak_flops is not None:
            values["perf/mfu"] = done["flops"] / seconds / (self.peak_flops * distributed.get_world_size())
        return values
