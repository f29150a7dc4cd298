"""Resuming on another layout: number of ranks, expert-parallel size or ZeRO stage.

A checkpoint of DeepSpeed is divided as its ranks were. Where the layout has changed it is put together
once, as DeepSpeed's universal checkpoint, loaded by the new ranks, and the copy deleted.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from mode import universal
from mode.config.file import RunConfig
from mode.config.section import ConfigError
from mode.training.checkpoints.consolidate import to_universal
from mode.training.checkpoints.unpickling import weights_only
from mode.training.loop.engine import device


def layout_of(run: RunConfig, world_size: int) -> dict[str, Any]:
    """What divides a checkpoint among files."""
    ep_size = 1 if run.mode.experts is None else run.mode.experts.ep_size
    layout = {"ep_size": ep_size, "zero_stage": run.engine.zero_stage, "precision": run.engine.precision}
    if run.engine.zero_stage > 0:  # stage 0 divides nothing among the ranks that hold the same experts
        layout = {"ranks": world_size, **layout}
    if run.engine.zero_stage == 3:
        layout["sub_group_size"] = run.deepspeed["zero_optimization"].get("sub_group_size")
    return layout


@contextlib.contextmanager
def for_any_layout(
    checkpoint: Path, copy: Path, saved: dict[str, Any], wanted: dict[str, Any], progress: Callable[[], None]
) -> Iterator[None]:
    """Puts `checkpoint` together as `copy`, which every layout can load while the context lasts. A collective.

    `progress` is called again and again, however long it takes.
    """
    for layout, what in ((saved, "was written"), (wanted, "is to be loaded")):
        if layout.get("zero_stage", 0) == 0:
            raise ConfigError(
                "zero_optimization.stage",
                f"{checkpoint} {what} at ZeRO stage 0, which DeepSpeed cannot bring to another layout: resume as it "
                f"was written ({describe(saved)}), or start a new run from its weights (tools/export.py, then "
                "mode.train.init_from)",
            )
    if distributed.get_rank() == 0:
        print(f"bringing {checkpoint} from {describe(saved)} to {describe(wanted)}", file=sys.stderr)
    problems: list[str | None] = [None]
    pool = ThreadPoolExecutor(1)  # not as a context: leaving it would wait for the conversion, whatever has happened
    work = pool.submit(_convert, checkpoint, copy) if distributed.get_rank() == 0 else None
    pool.shutdown(wait=False)
    # The ranks stay in touch: neither a long conversion nor a dead rank leaves the others in one silent wait.
    waiting = torch.ones((), device=device())
    while waiting:
        progress()
        if work is not None and work.done():
            waiting.zero_()
        distributed.broadcast(waiting, src=0)
        time.sleep(0.2 if waiting else 0)
    if work is not None and work.exception() is not None:
        problems = [str(work.exception())]
    distributed.broadcast_object_list(problems)
    if problems[0] is not None:
        raise ConfigError("--resume", f"{checkpoint} cannot be brought to another layout: {problems[0]}")
    try:
        yield
        distributed.barrier()  # every rank has read it
    finally:
        if distributed.get_rank() == 0:
            shutil.rmtree(copy, ignore_errors=True)


def load_universal(engine: Any, copy: Path) -> dict[str, Any]:
    """Restores the engine from a universal checkpoint and returns the state that was saved with it."""
    with weights_only(copy):
        return universal.load_universal(engine, copy)


def describe(layout: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in layout.items()) or "an unknown layout"


def _convert(checkpoint: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    to_universal(checkpoint, folder)
    with weights_only(folder):
        universal.complete(folder)
