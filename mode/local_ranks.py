"""Runs a function on several ranks of this machine, for tools and tests. Training itself is launched by DeepSpeed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch


class RankFailed(Exception):
    """A rank raised, or took too long."""


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    seconds: float = 3600,
    context: SpawnContext | ForkServerContext | None = None,
) -> list[Any]:
    """What `function(*arguments)` returns on each of `num_ranks` new processes that are told of each other.

    They find the address of their group in the environment, as under a launcher; joining it is up to the function.
    The function must be importable, and so must what it is given and returns.
    """
    context = context or multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.pt" for rank in range(num_ranks)]
        port = free_port()
        processes = [
            context.Process(target=_main, args=(rank, num_ranks, port, str(file), function, arguments))
            for rank, file in enumerate(files)
        ]
        with _without_interrupts():
            for process in processes:
                process.start()
        try:
            deadline = time.monotonic() + seconds
            while any(process.is_alive() for process in processes):
                if time.monotonic() > deadline or any(process.exitcode for process in processes):
                    break
                time.sleep(0.05)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        if codes != [0] * num_ranks:
            raise RankFailed(f"exit codes of the ranks: {codes} (None: ended because another failed or time was up)")
        return [torch.load(file, weights_only=False) for file in files]  # written by the processes above


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started here never sees Ctrl-C, which reaches all processes of a terminal: who started it ends it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """A port that nobody listens on, and that the system does not hand out by itself before it is used."""
    while True:
        port = random.SystemRandom().randrange(12000, 32000)  # below the range of ports that are given to clients
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _main(
    rank: int, num_ranks: int, port: int, file: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_SIZE": str(num_ranks),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.save(function(*arguments), file)
