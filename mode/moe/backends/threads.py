"""Experts side by side on a CPU, each computed by one core. Any dtype, any width.

An expert's products are too small to be divided well among cores. So every core takes whole experts, the largest
that is left, until none is; what it computes, and so the result, is the loop's whichever core it is. Where that
would leave cores idle (fewer experts than cores, one with most of the tokens), all of them share each product as ever.
"""

from __future__ import annotations

import functools
import heapq
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from mode.moe.backends.loop import Work, expert_by_expert, one_after_another
from mode.section import ConfigError

MAX_UNEVENNESS = 1.1  # the busiest core's rows by those of the mean; shared products lose about as much


def check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(
            "experts.backend", f'is "threads", which is for CPUs, and this is a {device.type} device; use "auto"'
        )


def threads_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    check_device(x_QD.device)
    return expert_by_expert(side_by_side, x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def side_by_side(work: Work, experts: list[tuple[int, slice]]) -> None:
    cores = torch.get_num_threads()
    by_size = sorted(experts, key=lambda expert: expert[1].start - expert[1].stop)
    if not _evenly_busy([rows.stop - rows.start for _, rows in by_size], cores):
        return one_after_another(work, experts)
    waiting = iter(by_size)  # one for all cores: whoever is free takes the next
    inference = torch.is_inference_mode_enabled()

    def take() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # each thread has its own of both
            for expert, rows in waiting:
                work(expert, rows)

    helpers = [_helpers(cores - 1).submit(take) for _ in range(cores - 1)]
    torch.set_num_threads(1)
    try:
        take()
    finally:
        wait(helpers)
        torch.set_num_threads(cores)
    for helper in helpers:
        helper.result()  # raises what it raised


def _evenly_busy(falling_sizes: list[int], cores: int) -> bool:
    """Whether the cores have about as much to do as each other when the least busy one takes the next expert."""
    loads = [0] * cores
    for size in falling_sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return cores > 1 and max(loads) * cores < MAX_UNEVENNESS * sum(loads)


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that wait for work as long as the process lives; the products within one are not divided further."""
    return ThreadPoolExecutor(count, "experts", initializer=torch.set_num_threads, initargs=(1,))
