"""Trains variations of configurations at one budget and shows what each setting is worth: the paper's hyperparameter
figure.

    python tools/sweep.py --config ds_configs/dense.json ds_configs/mod.json --flops 8e12 --output runs/capacity \\
        --vary mod:mode.depth.capacity_fraction=0.125,0.25,0.5,0.75,0.95 --vary mod:mode.depth.every=1,2
    python tools/sweep.py --config ds_configs/moe.json ds_configs/mode_integrated.json --output runs/no_ops \\
        --vary mode_integrated:mode.experts.no_op_fraction=0.25,0.5,0.75 --seeds 0 1 2
    python tools/sweep.py --config ds_configs/mod.json ds_configs/mod_stochastic.json --output runs/gates \\
        --vary mod:mode.depth.gate=raw,sigmoid,tanh --vary mod_stochastic:mode.depth.gate=one,raw --plan

Members run one after another, or --jobs at a time; the same command goes on where an earlier one stopped, and leaves
out what is finished. A member that fails is reported and does not stop the others. Settings that must change together
are another configuration file: mod_stochastic beside mod. A configuration without --vary is drawn as a line to measure
the others by.

Exit codes: 0; 1 when a member failed; 2 for wrong usage, or a directory of another experiment; 75 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.tool import Report, add_shared_options, conduct

from mode.tooling import positive_number

if TYPE_CHECKING:
    from experiments.members import Member
    from experiments.results import Point, Results

PICTURE = "sweep.png"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_options(parser, PICTURE)
    parser.add_argument(
        "--flops",
        type=positive_number,
        metavar="N",
        help="training FLOPs of every member, such as 5e12 (default: the files' length)",
    )
    return parser


def plan(options: argparse.Namespace) -> list[Member]:
    from experiments.members import parse_vary, plan_members

    return plan_members(
        options.config,
        vary=[parse_vary(text) for text in options.vary],
        settings=options.set,
        budgets=[options.flops],
        seeds=options.seeds or [None],
        world_size=options.world_size,
    )


def report(results: Results, options: argparse.Namespace) -> Report:
    """The points are all there is; in words, the best of each configuration."""
    lines = []
    for config in dict.fromkeys(point.member.config for point in results.points):
        points = [point for point in results.points if point.member.config == config]
        if len(points) > 1:
            lines.append(f"best of {len(points)} variations of {config}: {best_of(points, results.unit)}")
    return Report({}, [], lines)


def best_of(points: Sequence[Point], unit: str) -> str:
    """By the mean over the seeds that all have, beside the next best."""
    from comparing.matching import beside_the_seeds, spread

    seeds = sorted(set.intersection(*(set(point.seeds) for point in points)))
    if not seeds:
        return "unknown, as they have no seed in common"
    losses = {
        point.member.label: [loss for seed, loss in zip(point.seeds, point.losses, strict=True) if seed in seeds]
        for point in points
    }
    (best, first), (following, second), *_ = sorted(losses.items(), key=lambda item: fmean(item[1]))
    gap = fmean(second) - fmean(first)
    _, about_seeds = beside_the_seeds(gap, {best: spread(first), following: spread(second)})
    which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"{best}, {fmean(first):.4f} {unit} ({which}), {gap:.4f} ahead of {following}; {about_seeds}"


def draw(results: Results, found: Report, options: argparse.Namespace, path: str) -> None:
    from experiments.sweep_plot import draw_sweep

    draw_sweep(results, path)


def main(command_line: list[str] | None = None) -> int:
    return conduct(build_parser().parse_args(command_line), plan, report, draw, PICTURE)


if __name__ == "__main__":
    sys.exit(main())
