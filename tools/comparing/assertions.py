"""What a script may insist on: that runs have the same losses, or that one is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from comparing.comparable import judge
from comparing.matching import AXIS_NAMES, Figures, place, verdict
from mode.runs import COUNTED, Run, RunError, Variant


def equal(runs: Sequence[Run], tolerance: float) -> Figures:
    """Every loss of every logged step of all runs against those of the first."""
    first = runs[0]
    problems = [problem for run in runs[1:] for problem in _unequal(first, run, tolerance)]
    bits = "to the bit, in float32 as event files have it" if any(run.from_events for run in runs) else "to the bit"
    how = bits if tolerance == 0 else f"within {tolerance:g}"
    tags = _loss_tags(first)
    text = f"all {len(runs)} runs have equal losses {how}: {len(tags)} curves, {len(first.rows)} logged steps"
    return {"assert": "equal", "holds": not problems, "text": "; ".join(problems) or text}


def _loss_tags(run: Run) -> list[str]:
    """Without the counted loss, which is one of the others."""
    return sorted({tag for row in run.rows for tag in row if tag.startswith("loss/") and tag != COUNTED})


def _unequal(first: Run, second: Run, tolerance: float) -> list[str]:
    pair = f"{second.directory} and {first.directory}"
    tags = (_loss_tags(first), _loss_tags(second))
    if tags[0] != tags[1]:
        return [f"{pair} log different losses: only one has {', '.join(sorted(set(tags[0]) ^ set(tags[1])))}"]
    single = first.from_events or second.from_events  # event files have float32
    problems = []
    for tag in tags[0]:
        values, others = first.values(tag), second.values(tag)
        if values.keys() != others.keys():
            step = min(values.keys() ^ others.keys())
            problems.append(f"{pair} differ in {tag}: only one has it at step {step}")
            continue
        gaps = {step: _gap(values[step], others[step], single) for step in values}
        unequal = [step for step, gap in gaps.items() if gap > tolerance]
        if unequal:
            step, worst = unequal[0], max(gaps, key=lambda step: gaps[step])
            problems.append(
                f"{pair} differ in {tag} at {len(unequal)} of {len(gaps)} steps, first at step {step}: "
                f"{others[step]!r} and {values[step]!r}; most at step {worst}, by {gaps[worst]:.3g}"
            )
    return problems


def _gap(a: float, b: float, single: bool) -> float:
    """The distance of two losses; those that are not finite are equal if they are the same."""
    if single:
        a, b = float(np.float32(a)), float(np.float32(b))
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b)
    return gap if math.isfinite(gap) else math.inf


def better(first: Variant, second: Variant, by: float, axis: str) -> Figures:
    """That the verdict on `first` against `second` is "better", and by at least the share `by`."""
    if first is second:
        raise RunError(first.runs[0].directory, f"is of {first.label}, and so is the other: name two variants")
    for run in first.runs:
        step = run.diverged_at(run.loss_tag)
        if step is not None:
            return {"assert": "better", "holds": False, "text": f"{run.directory} is not finite from step {step} on"}
    common = judge([*first.runs, *second.runs])
    judged = verdict(first, second, axis, common, by)
    if judged["at"] is None or common.problem is not None or (judged["problem"] and judged["difference"] < 0):
        raise RunError(first.runs[0].directory, f"cannot be compared with {second.label}: {judged['problem']}")
    gain = -judged["difference"] / judged["baseline_loss"]["mean"]
    holds = judged["verdict"] == "better" and gain >= by
    where = "equal to" if gain == 0 else f"{abs(gain):.3%} {'below' if gain > 0 else 'above'}"
    compared = (
        f"{first.label} is {where} {second.label} at equal {AXIS_NAMES[axis]} ({place(axis, judged['at'])}): "
        f"{judged['loss']['mean']:.6f} and {judged['baseline_loss']['mean']:.6f} {common.unit}; "
        f"asked for: {f'at least {by:.3%} ' if by else ''}below"
    )
    more = ["name a margin by --by, or train more seeds"] if judged["outside_spread"] is None and not by else []
    text = "; ".join([compared, *judged["remarks"], *more])
    return {"assert": "better", "holds": holds, "gain": gain, "by": by, "at": judged["at"], "text": text}
