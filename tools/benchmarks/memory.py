"""The peak memory of a training step, each model in a process of its own.

Counted as what the resident size grows by from the built model to the peak: gradients, activations, optimizer
state and all that is held for a moment.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import models
from benchmarks.step import settings
from benchmarks.turns import why
from mode.host import keep_freed_memory
from mode.local_ranks import RankFailed, run_on_ranks
from mode.training.loop.engine import start_process_group

NATIVE = "moe, deepspeed.moe.layer.MoE"
PAGE = resource.getpagesize()

add_arguments = models.add_arguments


def peak_of_steps(name: str, options: argparse.Namespace) -> float:
    """Bytes; two steps, because the second has the optimizer's state beside everything else."""
    keep_freed_memory()
    start_process_group()
    run = models.run_config("moe" if name == NATIVE else name, options)
    model = models.native_model(run, options.tokens) if name == NATIVE else models.ModeTransformer(run.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = models.batches(run)
    before = resident()
    for _ in range(2):
        ids_BL = next(batches).input_ids
        loss = model(ids_BL, labels=ids_BL).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def measure(options: argparse.Namespace) -> dict[str, Any]:
    models.run_config("mode", options)  # refuses here what it would refuse in every process
    found: dict[str, list[float]] = {name: [] for name in (*models.VARIANTS, NATIVE)}
    absent: dict[str, str] = {}
    for _ in tqdm(range(options.repeats), desc="processes of each", leave=False, disable=None):
        for name in list(found):
            try:
                found[name].append(run_on_ranks(peak_of_steps, 1, name, options)[0])
            except RankFailed as error:
                if name != NATIVE:
                    raise
                absent[name] = why(error)
                del found[name]
    rows = []
    for name in found:
        peaks = found[name]
        rows.append(
            {"model": name, "peak_bytes": statistics.median(peaks), "lowest": min(peaks), "highest": max(peaks)}
        )
    return {"memory": rows, "absent": absent, "options": settings(options)}


def table(figures: dict[str, Any]) -> str:
    options = figures["options"]
    full = next(row["peak_bytes"] for row in figures["memory"] if row["model"] == "moe")
    lines = [
        f"Peak of a training step of {options['layers']} layers, width {options['width']}, {options['experts']} "
        f"experts, {options['tokens']} tokens, fp32, above the built model; median of "
        f"{options['repeats']} processes.",
        "",
        "| model | MB | range | of moe |",
        "|---|---|---|---|",
    ]
    for row in figures["memory"]:
        lines.append(
            f"| {row['model']} | {row['peak_bytes'] / 1e6:.0f} | {row['lowest'] / 1e6:.0f}-{row['highest'] / 1e6:.0f} "
            f"| {row['peak_bytes'] / full:.2f} |"
        )
    lines += [""] + [f"Not measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    return "\n".join(lines).rstrip()
