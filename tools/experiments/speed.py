"""How fast members train, for the times of a plan: as told, as measured, or by a few steps on this machine.

As a script, it trains the model of a configuration file on random tokens and prints its FLOPs per second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.members import Member
    from experiments.running import Outcome

FEWEST_STEPS, MOST_STEPS, SECONDS = 3, 30, 2.0  # measured: steps until so much time has passed
PATIENCE = 120.0  # seconds for all of it, the imports included
MEMORY_SHARE = 0.5  # of this machine's, that a model may take to be measured


@dataclass(frozen=True)
class Speed:
    flops_per_second: float | None  # of one member
    source: str  # where the number comes from, or why there is none

    def seconds(self, outcome: Outcome) -> float | None:
        """Training time of a member: measured if it is finished, else estimated."""
        if outcome.finished and outcome.run is not None:
            return outcome.run.seconds[-1]
        return None if self.flops_per_second is None else outcome.member.cost.flops / self.flops_per_second

    def seconds_left(self, outcomes: Sequence[Outcome], jobs: int) -> float | None:
        """Until all members are trained, `jobs` at a time."""
        if self.flops_per_second is None:
            return None
        flops = [
            item.member.cost.flops - (0 if item.run is None else item.run.last["flops"])
            for item in outcomes
            if not item.finished
        ]
        return max([sum(flops) / jobs, *flops]) / self.flops_per_second


def find_speed(outcomes: Sequence[Outcome], given: float | None, on_this_machine: bool, jobs: int) -> Speed:
    if given is not None:
        return Speed(given, "given by --flops_per_second")
    runs = [item.run for item in outcomes if item.run is not None and item.run.seconds[-1] > 0]
    if runs:
        rates = [run.last["flops"] / run.seconds[-1] for run in runs]
        return Speed(statistics.median(rates), f"the median of the {len(runs)} members that have logged steps")
    if not on_this_machine:
        return Speed(None, "the members run elsewhere or on several ranks; give --flops_per_second, as a run logs it")
    by_step = sorted((item.member for item in outcomes), key=lambda member: member.cost.flops / member.cost.steps)
    return measure_here(by_step[len(by_step) // 2], jobs)


def measure_here(member: Member, jobs: int) -> Speed:
    """By steps of `member` in a process of its own, with the threads that it would have."""
    from experiments.running import environment, last_error_of
    from mode import accounting

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if accounting.memory_per_rank(member.run, 1).total > MEMORY_SHARE * memory:
        return Speed(None, f"{member.name} is too large to be measured here; give --flops_per_second")
    print(f"measuring some steps of {member.name}; --flops_per_second N does without", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(member.document), encoding="utf-8")
        command = [sys.executable, __file__, str(config)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment(jobs), timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return Speed(None, f"{member.name} took more than {PATIENCE:.0f} s to measure; give --flops_per_second")
    if done.returncode != 0:
        error = last_error_of(done.stderr.splitlines())
        return Speed(None, f"{member.name} could not be measured: {error}; give --flops_per_second")
    source = f"measured now by some steps of {member.name} on random tokens on this machine (others may differ)"
    return Speed(float(done.stdout), source)


def measure(config_file: str) -> float:
    from mode.config.file import load_run_config
    from mode.host import keep_freed_memory, share_the_cores

    share_the_cores()
    keep_freed_memory()
    import torch

    from mode.data import Batch
    from mode.training.logging.metrics import counted_flops
    from mode.training.loop.engine import agreed_backend, build_engine, build_model, device, start_process_group
    from mode.training.loop.step import optimizer_step

    run = load_run_config(config_file)
    start_process_group()
    backend = agreed_backend(run)
    engine = build_engine(run, build_model(run.mode if backend is None else run.mode.with_backend(backend[0])), 1)
    rows, num_micros = run.engine.batch_layout(1)
    shape = (rows, run.mode.model.sequence_length)
    ids = [torch.randint(run.mode.model.vocab_size, shape) for _ in range(num_micros)]
    batches = [Batch(each, None, torch.arange(rows), torch.ones(rows)) for each in ids]
    seconds: list[float] = []
    while len(seconds) <= FEWEST_STEPS or (sum(seconds) < SECONDS and len(seconds) < MOST_STEPS):
        started = time.perf_counter()
        step = optimizer_step(engine, run, batches, device(), lambda losses, inputs: None)
        sums = step.sums.tolist()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return counted_flops(run.mode, rows * num_micros, sums) / statistics.median(seconds[1:])


def main(config_file: str) -> int:
    from mode.tooling import output_for_figures_alone

    with output_for_figures_alone():
        rate = measure(config_file)
    print(rate)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
