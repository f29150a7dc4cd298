"""How a training process uses the machine it runs on. Imports no torch, so that it can come before it."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
NEVER = -1  # as a threshold; the largest number, an int, would give back a free end of the heap of more than 2 GB


def num_cores() -> int:
    """Cores that this process may use, or all of the machine where the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_the_cores() -> None:
    """Threads = cores / ranks on this machine, unless the user chose. Must come before torch is imported.

    Idle threads spin for a moment only, then sleep: beside any other busy process, spinning ones make a step
    several times slower.
    """
    told = os.environ.get("LOCAL_SIZE", "")
    ranks = max(1, int(told)) if told.isdecimal() else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // ranks)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def keep_freed_memory() -> None:
    """Lets the C library keep what is freed, for the next tensor, unless the user chose by `MALLOC_MMAP_MAX_`.

    By default it asks the system for every large tensor anew and gives it back at once, and the system fills it
    with zeros page by page: a third of the time of a layer of 32k tokens. What it costs is memory, a fifth more at
    the peak, because kept pieces do not always fit. Only on Linux with glibc.
    """
    if sys.platform != "linux" or "MALLOC_MMAP_MAX_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, NEVER)


def default_cache_dir() -> Path:
    """`mode` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mode"
