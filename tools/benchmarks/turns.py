"""Contenders that take turns, so that a busy machine slows all of them alike. Knows nothing of what they do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm

CPU = torch.device("cpu")
PEAK_REPEATS = 20  # of each product that the peak is sought with
PEAK_SECONDS = 5.0


@dataclass(frozen=True)
class Contender:
    """Something that takes a turn; `run` does all of its work once, `reset` what is not to be timed."""

    name: str
    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None


def nothing() -> None:
    """For `before`, where nobody is to be waited for."""


def take_turns(
    contenders: Sequence[Contender],
    repeats: int,
    before: Callable[[], None] = nothing,
    quiet: bool = False,
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every run; a first round of all of them is left out, to warm up. `before` comes around each.

    Every other turn goes through them backwards: nobody always follows the same one, or comes later in a turn.
    With `failed`, a contender that raises is left out and its reason put there; without, it ends everything.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in tqdm(range(repeats + 1), desc="turns", leave=False, disable=quiet or None):
        for contender in contenders[:: -1 if turn % 2 else 1]:
            if contender.name not in seconds:
                continue
            contender.reset()
            before()
            started = time.perf_counter()
            try:
                contender.run()
            except Exception as error:  # somebody else's code: whatever it raises is what is reported
                if failed is None:
                    raise
                failed[contender.name] = why(error)
                del seconds[contender.name]
                continue
            before()
            if turn:
                seconds[contender.name].append(time.perf_counter() - started)
    return seconds


def why(error: Exception) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """How many times `over` is `under`: the median over the turns, and the middle half."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def show_ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def show_peak(peak: float) -> str:
    return f"Peak of a matrix product here and now: {peak / 1e9:.0f} GFLOP/s."


def wait_for(device: torch.device) -> Callable[[], None]:
    """What comes around a run on `device`, as `before`, so that a time is that of the work and not of its launch."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else nothing


def gemm_peak(
    device: torch.device = CPU, dtype: torch.dtype = torch.float32, sizes: Sequence[int] | None = None
) -> float:
    """FLOP/s of the best square product of several sizes: what this machine can do just now.

    After some seconds without the larger sizes: in half precision a processor that has no instructions for it is far
    slower.
    """
    wait = wait_for(device)
    rates: list[float] = []
    began = time.perf_counter()
    for size in sizes or ((128, 256, 512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192)):
        a, b, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
        for _ in range(PEAK_REPEATS):
            if rates and time.perf_counter() - began > PEAK_SECONDS:
                return max(rates)
            wait()
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            wait()
            rates.append(2 * size**3 / (time.perf_counter() - started))
    return max(rates)
