"""Experts side by side on a CPU, each computed by one core. Any dtype, any width.

An expert's products are too small to be divided well among cores. So every core takes whole experts (of those with few
tokens, several at a time), the most rows that are left, until none is; what it computes, and so the result, is the
loop's whichever core it is. Where that would leave cores idle (fewer experts than cores, one with most of the tokens),
all of them share each product as ever.
"""

from __future__ import annotations

import functools
import heapq
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mode.moe.backends.loop import Work, expert_by_expert, one_after_another
from mode.section import ConfigError

GROUPS_PER_CORE = 8  # of experts, where there are as many: enough to keep all cores busy to the end
MAX_UNEVENNESS = 1.1  # the busiest core's rows by those of the mean; shared products lose about as much


def check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(
            "experts.backend", f'is "threads", which is for CPUs, and this is a {device.type} device; use "auto"'
        )


def threads_experts(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    check_device(x_QD.device)
    num_groups = GROUPS_PER_CORE * torch.get_num_threads()
    return expert_by_expert(side_by_side, num_groups, x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


def side_by_side(work: Work, counts: list[int]) -> None:
    cores = torch.get_num_threads()
    if not _evenly_busy(counts, cores) or is_in_torch_dispatch_mode():  # a mode that counts sees its own thread only
        return one_after_another(work, counts)
    busiest_first = sorted((group for group, count in enumerate(counts) if count), key=lambda g: -counts[g])
    waiting = iter(busiest_first)  # one for all cores: whoever is free takes the next
    inference = torch.is_inference_mode_enabled()

    def take() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # each thread has its own of both
            for group in waiting:
                work(group)

    helpers = [_helpers(cores, os.getpid()).submit(take) for _ in range(cores)]
    for problem in [helper.exception() for helper in helpers]:  # of all, so that none is still at work
        if problem is not None:
            raise problem


def _evenly_busy(counts: list[int], cores: int) -> bool:
    """Whether the cores have about as much to do as each other when the least busy one takes the next group."""
    loads = [0] * cores
    for count in sorted(counts, reverse=True):
        heapq.heapreplace(loads, loads[0] + count)
    return cores > 1 and max(loads) * cores < MAX_UNEVENNESS * sum(counts)


@functools.cache
def _helpers(count: int, process: int) -> ThreadPoolExecutor:
    """Threads that wait for work as long as `process` lives; the products within one are not divided further.

    A forked process inherits this table, but no thread: it makes its own.
    """
    all_there = Barrier(count)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # only now is it this thread's own, whatever others set
        all_there.wait()

    pool = ThreadPoolExecutor(count, "experts")
    for begun in [pool.submit(begin) for _ in range(count)]:
        begun.result()
    torch.set_num_threads(count)  # theirs is what threads that come later would take
    return pool
