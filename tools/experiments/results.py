"""What the finished members of an experiment came to: seeds averaged, losses in one unit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comparing.comparable import Comparability, judge
from comparing.figures import variant_figures
from comparing.tables import Table, show_spread, show_time

from experiments.members import Cost, Member, show_budget
from experiments.running import Outcome
from experiments.speed import Speed
from mode.runs import Run, Variant

Figures = dict[str, Any]

FAR_FROM_BUDGET = 0.05  # a larger share is worth a warning: losses are compared at equal FLOPs


@dataclass(frozen=True)
class Point:
    """The finished seeds of one place of an experiment."""

    member: Member  # the first of them
    seeds: tuple[int, ...]
    losses: tuple[float, ...]  # counted: causal where depth-routed
    figures: Figures  # as tools/compare.py has them of a variant

    @property
    def cost(self) -> Cost:
        return self.member.cost

    @property
    def name(self) -> str:
        budget = self.member.budget
        return " ".join(filter(None, [self.member.label, self.member.size, budget and show_budget(budget)]))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def deviation(self) -> float:
        """Over seeds; 0 for one."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0

    def to_dict(self) -> Figures:
        names = ("config", "label", "varied", "size", "budget")
        taken = ("final", "final_top_k", "final_causal", "flops_per_token", "step_seconds", "no_op_share", "kept_share")
        return {
            **{name: getattr(self.member, name) for name in names},
            "plan": self.member.to_dict()["plan"],
            "seeds": list(self.seeds),
            "loss": self.figures["final"],
            **{f"measured_{name}": self.figures[name] for name in taken if name != "final"},
        }


@dataclass(frozen=True)
class Results:
    outcomes: list[Outcome]
    points: list[Point]
    common: Comparability | None  # None while no member is finished
    warnings: list[str]

    @property
    def unit(self) -> str:
        return "" if self.common is None else self.common.unit

    @property
    def causal(self) -> bool:
        """Whether any counted loss is a causal one."""
        return any(outcome.run.config.depth is not None for outcome in self.outcomes if outcome.run is not None)

    def to_dict(self) -> Figures:
        members = [
            {**outcome.member.to_dict(), "state": outcome.state, "problem": outcome.problem or None}
            for outcome in self.outcomes
        ]
        points = [point.to_dict() for point in self.points]
        return {"unit": self.unit, "warnings": self.warnings, "members": members, "points": points}


def gather(outcomes: Sequence[Outcome], warnings: Sequence[str] = ()) -> Results:
    """`warnings` are of the plan."""
    done = [(outcome.member, outcome.run) for outcome in outcomes if outcome.finished and outcome.run is not None]
    if not done:
        return Results(list(outcomes), [], None, list(warnings))
    common = judge([run for _, run in done])
    places: dict[Any, list[tuple[Member, Run]]] = {}
    for member, run in done:
        places.setdefault(member.point, []).append((member, run))
    points = [_point(pairs, common) for pairs in places.values()]
    far = filter(None, (_far_from_budget(member, run) for member, run in done))
    return Results(list(outcomes), points, common, [*warnings, *common.warnings, *far, *_other_seeds(points)])


def _point(pairs: Sequence[tuple[Member, Run]], common: Comparability) -> Point:
    member, runs = pairs[0][0], tuple(run for _, run in pairs)
    losses = tuple(float(run.counted.loss[-1]) * common.scale(run) for run in runs)
    figures = variant_figures(Variant(member.label, runs), common)
    return Point(member, tuple(run.seed for run in runs), losses, figures)


def _other_seeds(points: Sequence[Point]) -> list[str]:
    """Means over different seeds are not quite comparable."""
    everybody = sorted({seed for point in points for seed in point.seeds})
    short = [point for point in points if len(point.seeds) < len(everybody)]
    if not short:
        return []
    which = ", ".join(f"{point.name} ({', '.join(map(str, point.seeds))})" for point in short)
    return [f"not all of the seeds {', '.join(map(str, everybody))} are finished, or meant to be, everywhere: {which}"]


def _far_from_budget(member: Member, run: Run) -> str | None:
    asked, counted = run.config.train.flops, run.last["flops"]
    if asked is None or abs(counted / asked - 1) <= FAR_FROM_BUDGET:
        return None
    return (
        f"{member.name} took {counted:.3e} training FLOPs as counted, {counted / asked - 1:+.1%} from its budget of "
        f"{asked:.3e}: routing took other shares than planned, or the steps are few"
    )


# ---------------------------------------------------------------------------------------------------
# Tables


def plan_table(outcomes: Sequence[Outcome], speed: Speed, jobs: int) -> Table:
    """The members before, while or after they run."""
    rows = []
    for outcome in outcomes:
        member, cost = outcome.member, outcome.member.cost
        seconds = speed.seconds(outcome)
        time = show_time(seconds) if outcome.finished or seconds is None else f"about {show_time(seconds)}"
        rows.append([member.name, *cost_cells(cost), f"{cost.steps:,}", f"{cost.tokens:,}", f"{cost.flops:.3e}", time])
        rows[-1].append(outcome.state)
    header = ["member", *COST_HEADER, "steps", "tokens", "training FLOPs", "time", "state"]
    about = "expected by mode.accounting; FLOPs/token: of a forward pass; time: of training alone, without evaluation "
    about += "and saving, "
    left = speed.seconds_left(outcomes, jobs)
    if speed.flops_per_second is None or left is None:
        about += f"not estimated: {speed.source}"
    else:
        about += f"estimated from {speed.flops_per_second:.3g} FLOP/s, {speed.source}, or measured of those finished; "
        about += f"in all about {show_time(left)} to go, {jobs} at a time"
    return Table("plan", header, rows, about)


COST_HEADER = ["parameters", "active", "FLOPs/token"]


def cost_cells(cost: Cost) -> list[str]:
    return [f"{cost.parameters:,}", f"{cost.active_parameters:,}", f"{cost.flops_per_token:.3e}"]


def points_table(results: Results) -> Table:
    rows = []
    for point in results.points:
        member, figures = point.member, point.figures
        where = [member.size or "-", "-" if member.budget is None else show_budget(member.budget)]
        measured = [show_spread(figures[name], ".4f") for name in ("final", "final_top_k")]
        seeds = ", ".join(map(str, point.seeds))
        rows.append([member.label, *where, seeds, *measured, *cost_cells(point.cost), f"{point.cost.tokens:,}"])
        counted = figures["flops_per_token"]
        rows[-1].append("-" if counted is None else f"{counted['mean']:.3e}")
    header = ["variant", "size", "budget", "seeds", "loss", "top-k", *COST_HEADER, "tokens", "training FLOPs/token"]
    shown = [i for i, name in enumerate(header) if name not in ("size", "budget") or any(row[i] != "-" for row in rows)]
    header, *rows = [[row[i] for i in shown] for row in (header, *rows)]
    about = (
        "loss: validation loss at the end of training, causal where depth-routed, as top-k sees the future; mean +- "
        "sample standard deviation over seeds; FLOPs/token: of a forward pass, expected; training FLOPs/token: counted"
    )
    return Table(f"results, {results.unit}", header, rows, about)


def troubles(results: Results) -> list[str]:
    """The members that are not finished, each with the reason."""
    return [f"{outcome.member.name}: {outcome.text}" for outcome in results.outcomes if not outcome.finished]
