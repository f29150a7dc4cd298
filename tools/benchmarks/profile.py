"""Where the time of a training step goes, by kind of work, for MoE and MoDE models. `--plot` draws it.

As the thread that trains spends it: of `native` experts, which are computed side by side, the products that this thread
does itself are products, and where it waits for the others at the end is elementwise work, as all within the kernel.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks import models
from benchmarks.step import Model, settings
from mode.training.loop.engine import start_process_group

# By the names of torch's operators; the first that fits counts, what fits none is "the rest".
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
    "attention": ("scaled_dot_product",),
    "optimizer": ("_fused_adam", "aten::_foreach", "aten::addcdiv", "aten::addcmul", "aten::sqrt"),
    "moving rows": ("index", "gather", "scatter", "embedding", "sort", "aten::cat", "aten::copy_", "aten::bincount"),
    "elementwise": (
        *("aten::mul", "aten::add", "aten::div", "aten::sub", "aten::silu", "aten::pow", "aten::rsqrt", "aten::mean"),
        *("aten::sum", "aten::fill_", "aten::zero_", "softmax", "aten::neg", "aten::exp", "deepspeed_mode::"),
    ),
}
WARM_UP = 3  # steps; until then the system fills new memory with zeros
COLOURS = ("#0072B2", "#56B4E9", "#CC79A7", "#E69F00", "#009E73", "#999999")  # told apart without seeing colour well


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table as bars (needs matplotlib)")


def kind_of(operator: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), "the rest")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    start_process_group()
    found = {name: Model(name, options) for name in models.VARIANTS}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    for turn in tqdm(range(WARM_UP + options.repeats), desc="turns", leave=False, disable=None):
        for name, model in found.items():
            seconds = seconds_by_kind(model)
            if turn >= WARM_UP:
                steps[name].append(seconds)
    rows = [
        {"model": name, "seconds": {kind: statistics.median(step[kind] for step in each) for kind in each[0]}}
        for name, each in steps.items()
    ]
    return {"profile": rows, "options": settings(options)}


def seconds_by_kind(model: Model) -> dict[str, float]:
    """Of one step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model.step()
    events = profiler.events()
    trains = statistics.mode(event.thread for event in events)  # other threads only help out within a kernel
    seconds = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in events:
        if event.thread == trains:
            seconds[kind_of(event.name)] += event.self_cpu_time_total / 1e6
    return seconds


def draw(figures: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    rows = figures["profile"][::-1]
    left = [0.0] * len(rows)
    for kind, colour in zip(rows[0]["seconds"], COLOURS, strict=True):
        widths = [row["seconds"][kind] for row in rows]
        axes.barh([row["model"] for row in rows], widths, left=left, label=kind, color=colour, edgecolor="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds of a training step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(COLOURS), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def table(figures: dict[str, Any]) -> str:
    options, rows = figures["options"], figures["profile"]
    kinds = list(rows[0]["seconds"])
    lines = [
        f"Milliseconds of a training step, {options['layers']} layers, width {options['width']}, {options['experts']} "
        f"experts, {options['tokens']} tokens, fp32; median of {options['repeats']} profiled steps.",
        "",
        "| model | " + " | ".join(kinds) + " | all |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    for row in rows:
        values = list(row["seconds"].values())
        cells = [f"{value * 1e3:.0f}" for value in [*values, sum(values)]]
        lines.append(f"| {row['model']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
