"""SIGTERM and SIGINT: whoever asks a run to stop gets exit code 75. Imports no torch, so that it can come before it."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_INTERRUPTED = 75  # the usual code for "try again": the run can be resumed
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Ends the process at once while there is nothing to save; after `defer`, remembers the signal for the loop."""

    def __init__(self) -> None:
        self.received = self._deferred = False
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def defer(self) -> None:
        """From here on other ranks may wait for this one: all stop together, after a step."""
        self._deferred = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if not self._deferred:
            os.write(2, b"stopped before the first step: there is nothing to save\n")
            raise SystemExit(EXIT_INTERRUPTED)


def ignore_stop_signals() -> None:
    """While the interpreter ends, so that a late signal does not change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
