"""Losses at equal steps, tokens, FLOPs and time, and what the difference between two variants is worth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from comparing.comparable import Comparability, judge, lacks_causal
from mode.runs import Run, Variant, describe_extension

Figures = dict[str, Any]

AXIS_NAMES = {"steps": "steps", "tokens": "tokens", "flops": "training FLOPs", "seconds": "training time"}
NEARLY_THROUGH = 0.9  # of a run's steps: its learning rate has come down
SPREADS = 2.0  # how many standard deviations of the difference between two runs the seeds are granted


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def spread(values: Sequence[float | None]) -> Figures | None:
    """Mean, sample standard deviation (from two seeds on) and range; None if a value is missing."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return {
        "n": len(known),
        "mean": statistics.fmean(known),
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "min": min(known),
        "max": max(known),
    }


def place(axis: str, x: float) -> str:
    """A place on an axis, with its unit."""
    forms = {
        "steps": f"step {x:,.0f}",
        "tokens": f"{x:,.0f} tokens",
        "flops": f"{x:.4g} FLOPs",
        "seconds": f"{x:.4g} s",
    }
    return forms[axis]


@dataclass(frozen=True)
class Overlap:
    """Where every run has its counted loss. Nothing is extrapolated."""

    low: float
    high: float
    shortest: Path | None = None  # the run that ends before others
    problem: str | None = None  # why there is none


def lack(run: Run, axis: str) -> str | None:
    """Why a run has no place on an axis."""
    if run.counted.span(axis) is not None:
        return None
    missing = f"did not record its {AXIS_NAMES[axis]}" if len(run.counted.loss) else "has no finite evaluation"
    return f"{run.directory} {missing}"


def overlap(runs: Sequence[Run], axis: str) -> Overlap:
    spans = []
    for run in runs:
        span = run.counted.span(axis)
        if span is None:
            return Overlap(math.nan, math.nan, problem=lack(run, axis))
        spans.append((span, run.directory))
    (low, _), latest = max(spans, key=lambda item: item[0][0])
    (_, high), shortest = min(spans, key=lambda item: item[0][1])
    if low > high:
        problem = (
            f"no overlap in {AXIS_NAMES[axis]}: {latest} is first evaluated at {place(axis, low)}, after the last "
            f"evaluation of {shortest} at {place(axis, high)}"
        )
        return Overlap(math.nan, math.nan, problem=problem)
    return Overlap(low, high, shortest if any(span[1] > high for span, _ in spans) else None)


def losses_at(variant: Variant, axis: str, x: float, common: Comparability) -> Figures | None:
    return spread([run.counted.at(axis, x) * common.scale(run) for run in variant.runs])


def matched(variants: Sequence[Variant], axis: str, num_points: int, common: Comparability) -> Figures:
    """The counted losses at `num_points` places, the last being the end of the shortest run.

    A variant with a run that has no place on the axis is left out, and so is one that begins after another has ended;
    the others are compared all the same.
    """
    lacking = {variant.label: [text for run in variant.runs if (text := lack(run, axis))] for variant in variants}
    problems = [text for texts in lacking.values() for text in texts]
    present = [variant for variant in variants if not lacking[variant.label]]
    if not present:
        return {"problems": problems, "points": []}
    found = overlap([run for variant in present for run in variant.runs], axis)
    while found.problem is not None:
        problems.append(found.problem)
        if len(present) < 3:  # there would be nothing to compare it with
            return {"problems": problems, "points": []}
        present.remove(max(present, key=lambda variant: max(run.counted.x[axis][0] for run in variant.runs)))
        found = overlap([run for variant in present for run in variant.runs], axis)
    shares = [(index + 1) / num_points for index in range(num_points - 1)]
    places = [found.low + share * (found.high - found.low) for share in shares] if found.low < found.high else []
    return {
        "problems": problems,
        "points": [
            {
                "at": x,
                "loss": {variant.label: losses_at(variant, axis, x, common) for variant in variants},
                "through": {variant.label: through(variant, axis, x) for variant in present},
            }
            for x in [*places, found.high]
        ],
    }


def verdict(variant: Variant, baseline: Variant, axis: str, common: Comparability, by: float = 0.0) -> Figures:
    """At the last place that both reach; other variants have no say in it.

    `verdict` is "better" or "worse" only where the losses can be compared, the one with the higher loss is as far
    through its schedule, and the difference is outside the seeds' spread or, where there is one seed and so no spread,
    at least the share `by` that was asked for. Otherwise it is None, and the remarks say why.
    """
    figures: Figures = {"variant": variant.label, "baseline": baseline.label, "axis": axis, "verdict": None}
    found = overlap([*variant.runs, *baseline.runs], axis)
    if found.problem is not None:
        text = f"{variant.label} against {baseline.label}: no verdict, {found.problem}"
        return figures | {"at": None, "problem": found.problem, "text": text}
    x = found.high
    mine, other = losses_at(variant, axis, x, common), losses_at(baseline, axis, x, common)
    assert mine is not None and other is not None
    difference = mine["mean"] - other["mean"]
    percent = 100 * difference / other["mean"]
    lower, higher = (variant, baseline) if difference < 0 else (baseline, variant)
    problem = why_incomparable(lower, higher, axis, x)
    outside, about_seeds = beside_the_seeds(difference, {variant.label: mine, baseline.label: other})
    shown = abs(percent) >= 100 * by > 0 if outside is None else outside
    if problem is None and abs(difference) < 5e-5:
        figures["verdict"] = "equal in these digits"
    elif problem is None and shown:
        figures["verdict"] = "better" if difference < 0 else "worse"
    text = (
        f"{variant.label} against {baseline.label} at equal {AXIS_NAMES[axis]} ({place(axis, x)}): {mine['mean']:.4f} "
        f"against {other['mean']:.4f} {common.unit}, {difference:+.4f} ({percent:+.2f} %), "
    )
    remarks = [about_seeds]
    early = [
        f"{item.label} is only through {share:.0%} of its steps there"
        for item in (variant, baseline)
        if (share := through(item, axis, x)) is not None and share < NEARLY_THROUGH
    ]
    remarks += [*early, f"{found.shortest} ends there"] if early and found.shortest else early
    remarks += [
        f"{run.directory} counts by its top-k loss, which sees the future"
        for run in (*variant.runs, *baseline.runs)
        if lacks_causal(run)
    ]
    remarks += [
        f"{run.directory} is not finite from step {step} on"
        for run in (*variant.runs, *baseline.runs)
        if (step := run.diverged_at(run.loss_tag)) is not None
    ]
    remarks += [
        f"{run.directory} was {describe_extension(extension)}"
        for run in (*variant.runs, *baseline.runs)
        for extension in run.extensions
    ]
    incomparable = judge([*variant.runs, *baseline.runs]).problem
    if incomparable is not None:
        remarks.append(f"NOT COMPARABLE: {incomparable}")
    word = "no verdict: " if figures["verdict"] is None else f"{figures['verdict']}; "
    return figures | {
        "at": x,
        "loss": mine,
        "baseline_loss": other,
        "difference": difference,
        "percent": percent,
        "outside_spread": outside,
        "problem": problem,
        "remarks": remarks,
        "text": text + word + "; ".join(remarks),
    }


def why_incomparable(lower: Variant, higher: Variant, axis: str, x: float) -> str | None:
    """Why a lower loss at `x` does not speak for its variant, whatever the seeds say."""
    problem = judge([*lower.runs, *higher.runs]).problem
    if problem is not None:
        return problem
    for run in lower.runs:
        if (step := run.diverged_at(run.loss_tag)) is not None:
            return f"{run.directory} is not finite from step {step} on"
        if lacks_causal(run):
            return f"{run.directory} counts by its top-k loss, which sees the future"
    ahead, behind = through(lower, axis, x), through(higher, axis, x)
    if behind is not None and behind < NEARLY_THROUGH * (1.0 if ahead is None else ahead):
        than = "" if ahead is None else f", {lower.label} through {ahead:.0%}"
        return (
            f"{higher.label} is only through {behind:.0%} of its steps where it is compared{than}: its learning rate "
            "is still high; let it finish, or compare runs of equal length"
        )
    return None


def beside_the_seeds(difference: float, losses: dict[str, Figures]) -> tuple[bool | None, str]:
    """Whether a difference lies outside the spread of the seeds, and how that was found."""
    single = [label for label, loss in losses.items() if loss["n"] < 2]
    if single:
        return None, f"one seed of {' and of '.join(single)}: spread unknown"
    first, second = losses.values()
    limit = SPREADS * math.hypot(first["std"], second["std"])
    apart = first["max"] < second["min"] or second["max"] < first["min"]
    outside = abs(difference) > limit and apart
    return outside, (
        f"{'outside' if outside else 'within'} the seeds' spread ({first['n']} and {second['n']} seeds; "
        f"{SPREADS:g} sqrt(s1^2 + s2^2) = {limit:.4f} with sample standard deviations {first['std']:.4f} and "
        f"{second['std']:.4f}; their ranges {'are apart' if apart else 'meet'})"
    )


def through(variant: Variant, axis: str, x: float) -> float | None:
    """The share of its planned steps that the variant's least advanced run has done at `x`."""
    shares = []
    for run in variant.runs:
        curve = run.counted
        if run.planned_steps is None:
            return None
        shares.append(float(np.interp(x, curve.x[axis], curve.x["steps"])) / run.planned_steps)
    return min(shares)
