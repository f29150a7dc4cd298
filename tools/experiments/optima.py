"""IsoFLOP curves: per budget and variant the fitted optimum, the best member, and both beside the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comparing.matching import beside_the_seeds

from experiments.fitting import FEWEST_SIZES, Parabola, between, fit
from experiments.results import Point

AXES = {
    "parameters": "parameters",
    "active": "active parameters per token",
    "flops_per_token": "forward FLOPs per token",
}
MOST_MISSED = 0.01  # of a loss, about what seeds differ by: beyond it a parabola does not describe the sizes
QUANTITIES = ("parameters", "active_parameters", "flops_per_token")


def place(point: Point, axis: str) -> float:
    return float(getattr(point.cost, "active_parameters" if axis == "active" else axis))


@dataclass(frozen=True)
class Optimum:
    """A place on an isoFLOP curve, fitted or measured."""

    loss: float
    parameters: float
    active_parameters: float
    flops_per_token: float  # of a forward pass
    size: str | None = None  # of a measured one


@dataclass(frozen=True)
class Curve:
    """One variant at one budget."""

    budget: float
    label: str
    points: list[Point]
    curve: Parabola | None
    optimum: Optimum | None
    best: Optimum  # measured
    problem: str | None  # why there is no optimum

    @property
    def reference(self) -> Optimum:
        """What the FLOPs of a picture are relative to."""
        return self.optimum or self.best

    @property
    def reference_name(self) -> str:
        return f"{self.label}'s optimum" if self.optimum is not None else self.best_name

    @property
    def best_name(self) -> str:
        return f"{self.label}'s best member, {self.best.size}"


def curves(points: Sequence[Point], axis: str) -> list[Curve]:
    groups: dict[tuple[float, str], list[Point]] = {}
    for point in points:
        assert point.member.budget is not None
        groups.setdefault((point.member.budget, point.member.label), []).append(point)
    return [_curve(budget, label, group, axis) for (budget, label), group in groups.items()]


def _curve(budget: float, label: str, points: list[Point], axis: str) -> Curve:
    points = sorted(points, key=lambda point: place(point, axis))
    runs = [(place(point, axis), loss) for point in points for loss in point.losses]
    found = fit([x for x, _ in runs], [loss for _, loss in runs])
    best = _measured(lowest_point(points))
    if found is None:
        problem = f"{len(points)} finished of the {FEWEST_SIZES} sizes that a curve needs"
        return Curve(budget, label, points, None, None, best, problem)
    places = [place(point, axis) for point in points]
    missed = max(abs(float(found.at(x)) / point.mean - 1) for x, point in zip(places, points, strict=True))
    if missed > MOST_MISSED:
        problem = f"no parabola: the best one misses a size by {missed:.1%} of its loss; add sizes around {best.size}"
        return Curve(budget, label, points, None, None, best, problem)
    lowest = found.lowest
    if lowest is None:
        return Curve(budget, label, points, found, None, best, found.problem)
    if best.size in (points[0].member.size, points[-1].member.size):
        where = "below" if best.size == points[0].member.size else "above"
        problem = f"the best size, {best.size}, is at the edge of the family: no optimum found (add sizes {where} it)"
        return Curve(budget, label, points, found, None, best, problem)
    values = {name: between(lowest, places, [getattr(point.cost, name) for point in points]) for name in QUANTITIES}
    return Curve(budget, label, points, found, Optimum(float(found.at(lowest)), **values), best, None)


def _measured(point: Point) -> Optimum:
    values = {name: float(getattr(point.cost, name)) for name in QUANTITIES}
    return Optimum(point.mean, **values, size=point.member.size)


def lowest_point(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: point.mean)


def cheapest_as_good(curve: Curve, loss: float) -> Point | None:
    """The member with the fewest FLOPs per forward pass among those that reach `loss`."""
    reaching = [point for point in curve.points if point.mean <= loss]
    return min(reaching, key=lambda point: point.cost.flops_per_token) if reaching else None


def find_baseline(found: Sequence[Curve], budget: float, label: str) -> Curve | None:
    return next((curve for curve in found if curve.budget == budget and curve.label == label), None)


def to_dict(curve: Curve, baseline: Curve | None) -> dict[str, Any]:
    """What was fitted stands beside what was fitted, what was measured beside what was measured."""
    return {
        "budget": curve.budget,
        "label": curve.label,
        "sizes": [point.member.size for point in curve.points],
        "fit": None if curve.curve is None else asdict(curve.curve),
        "problem": curve.problem,
        "optimum": _beside(curve.optimum, None if baseline is None else baseline.optimum),
        "best": _beside(curve.best, None if baseline is None else baseline.best),
        "cheapest_as_good_as_baseline": None if baseline is None else _cheapest(curve, baseline),
    }


def _cheapest(curve: Curve, baseline: Curve) -> dict[str, Any] | None:
    point, best = cheapest_as_good(curve, baseline.best.loss), lowest_point(baseline.points)
    if point is None or curve is baseline:
        return None
    losses = {one.name: one.figures["final"] for one in (point, best)}
    found = _beside(_measured(point), baseline.best)
    assert found is not None
    return {**found, "as_good_as": baseline.best_name, "seeds": beside_the_seeds(point.mean - best.mean, losses)[1]}


def _beside(optimum: Optimum | None, reference: Optimum | None) -> dict[str, Any] | None:
    if optimum is None:
        return None
    return {
        **asdict(optimum),
        "relative_flops": None if reference is None else optimum.flops_per_token / reference.flops_per_token,
        "relative_loss": None if reference is None else optimum.loss / reference.loss - 1,
    }
