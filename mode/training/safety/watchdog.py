"""A rank that waits for another one forever: noticed within a stated time, and named.

A rank that dies breaks its connections, so the collectives of the others fail; a rank that hangs leaves
them waiting. Either way every other rank says in one line at which stage it was, in which collective and
where that was called from, and ends with EXIT_WATCHDOG. The last complete checkpoint is untouched.

Knows nothing of what a stage is or which rank is to blame: a rank sees only its own stack.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, TracebackType
from typing import NoReturn, Self

from torch.distributed import DistError

from mode.training.safety.stops import EXIT_WATCHDOG

PACKAGE = Path(__file__).parents[2]  # `mode`
COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
EARLIER = "wait for a collective started earlier"
TICKS = 20  # looks per limit: a stall is noticed at most a twentieth of the limit late


class Watchdog:
    """Ends this process when `progress` is not called for `limit` seconds (None: never).

    As a context manager it also ends the process, in the same words, on a collective that failed because
    another rank is gone. Time is counted in looks of its own thread, so a process that was itself stopped
    and continued, or a machine that slept, does not find the time used up.
    """

    def __init__(self, limit: float | None, rank: int) -> None:
        self.limit, self.rank = limit, rank
        self.stage, self.patience, self.beats = "the start", 0.0, 0
        self._closed, self._leaving = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        if self.limit is not None:
            threading.Thread(target=self._watch, args=(self.limit,), name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None and lost_a_rank(error):
            where = whereabouts([stack_of(error)])
            self._leave(f"contact lost at {self.stage}, {where}: {reason(error)}; another rank has died or hangs")

    def progress(self, stage: str, patience: float = 0.0) -> None:
        """Called wherever the run gets on; `stage` is what it is about to do, as in "step 12".

        A stage with `patience` is given so many seconds even where the limit is shorter.
        """
        self.stage, self.patience = stage, patience
        self.beats += 1

    @contextlib.contextmanager
    def following(self, stage: str, measure: Callable[[], object]) -> Iterator[None]:
        """Takes every change of `measure()` for progress, also while this rank waits for others that cause it.

        It is measured in a thread of its own: what blocks there does not keep the watchdog from noticing.
        """
        over = threading.Event()

        def follow(limit: float) -> None:
            seen = measure()
            while not over.wait(limit / TICKS):
                before, seen = seen, measure()
                if seen != before and not over.is_set():
                    self.progress(stage)

        if self.limit is not None:
            threading.Thread(target=follow, args=(self.limit,), name="following", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """From here on this rank waits for nobody."""
        self._closed.set()

    def _watch(self, limit: float) -> None:
        seen, idle = self.beats, 0
        while not self._closed.wait(limit / TICKS):
            seen, idle = self.beats, idle + 1 if self.beats == seen else 0
            allowed = max(limit, self.patience)
            if idle * limit >= allowed * TICKS:
                self._leave(f"no progress for {allowed:g} s at {self.stage}, {_explained(whereabouts(stacks()))}")

    def _leave(self, message: str) -> NoReturn:
        """Prints and ends the process at once: exit handlers could wait for the lost rank again."""
        line = f"error: rank {self.rank}: {message}. Nothing saved is lost: start the same command again\n"
        self._leaving.acquire()  # for good: a rank speaks once, though both its threads may have noticed
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="replace"))
        os._exit(EXIT_WATCHDOG)


def lost_a_rank(error: BaseException) -> bool:
    """Whether a collective failed on the way to another rank, rather than by a mistake in the call.

    NCCL and the rendezvous have exceptions of their own. Gloo has not, but its messages start with the
    place in its source; the checks of its arguments say "enforce fail".
    """
    text = str(error)
    from_gloo = isinstance(error, RuntimeError) and "gloo/transport/" in text and "enforce fail" not in text
    return isinstance(error, DistError) or from_gloo


def reason(error: BaseException) -> str:
    """The first line of an error, without gloo's source path before it and its advice after it."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", first).split(". This is typically")[0].rstrip(".")


def stacks() -> list[list[FrameSummary]]:
    """The Python stacks of the other threads, the main thread's first; each from the innermost call outwards."""
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [list(_summaries(traceback.walk_stack(frame))) for thread, frame in frames if thread != own]


def stack_of(error: BaseException) -> list[FrameSummary]:
    """Where an error came from, from the innermost call outwards."""
    return list(_summaries(traceback.walk_tb(error.__traceback__)))[::-1]


def whereabouts(stacks: Iterable[Sequence[FrameSummary]]) -> str:
    """The collective that one of the stacks is in, and the innermost call of this package around it."""
    known = [(collective_in(stack), place_in(stack)) for stack in stacks]
    places = [place for _, place in known if place is not None]
    for collective, place in known:
        if collective is not None:
            place = place or (places[0] if places else None)  # backward may run in a thread of its own
            return f"inside {collective}" + (f" (called from {place})" if place else "")
    return "outside any collective" + (f" (in {places[0]})" if places else "")


def collective_in(stack: Sequence[FrameSummary]) -> str | None:
    """The innermost collective of torch.distributed on a stack, or None."""
    for call in stack:
        if call.filename.endswith(COLLECTIVES) and not call.name.startswith("_"):
            return call.name
    if stack and "deepspeed" in Path(stack[0].filename).parts and ".wait(" in (stack[0].line or ""):
        return EARLIER
    return None


def place_in(stack: Sequence[FrameSummary]) -> str | None:
    """The innermost call of this package on a stack, as "mode/moe/dispatch.py:31 in dispatch"."""
    for call in stack:
        path = Path(call.filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE.parent).as_posix()}:{call.lineno} in {call.name}"
    return None


def _summaries(walk: Iterable[tuple[FrameType, int]]) -> traceback.StackSummary:
    return traceback.StackSummary.extract(walk, lookup_lines=False)


def _explained(where: str) -> str:
    slow = "is slower than mode.train.watchdog_seconds allows"
    if where.startswith("inside"):
        return f"{where}; another rank has died, hangs or {slow}"
    return f"{where}; this rank hangs, waits for its device or {slow}"
