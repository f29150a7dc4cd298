"""The paper's isoFLOP figure: a row per budget, loss against size on the left, against relative FLOPs on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from comparing.plot import legend_below
from numpy.typing import NDArray

from experiments.drawing import finish, logarithmic, new_figure, save, style
from experiments.members import show_budget
from experiments.optima import AXES, Curve, find_baseline, place
from experiments.results import Results

CURVE_POINTS = 100


def draw_isoflop(found: Sequence[Curve], axis: str, baseline: str, results: Results, path: str) -> None:
    from matplotlib.lines import Line2D

    budgets = sorted({curve.budget for curve in found})
    labels = list(dict.fromkeys(curve.label for curve in found))
    rows = len(budgets)
    figure, panels = new_figure(rows, 2, (12, 4.1 * rows + 0.9), sharex="col", sharey="row")
    relative = [value for curve in found for value in _relative(curve, find_baseline(found, curve.budget, baseline))]
    for row, budget in enumerate(budgets):
        reference = find_baseline(found, budget, baseline)
        left, right = panels[row]
        for curve in (curve for curve in found if curve.budget == budget):
            look = style(labels.index(curve.label))
            _draw_by_size(left, curve, axis, look)
            if reference is not None:
                _draw_by_flops(right, curve, axis, reference, look)
        left.set_title(f"{show_budget(budget)} training FLOPs", fontsize=12, loc="left")
        if reference is not None:
            right.axvline(1, color="0.6", linewidth=1, zorder=0)
            right.axhline(reference.reference.loss, color="0.6", linewidth=1, zorder=0)
            right.set_title(f"relative to {reference.reference_name}", fontsize=11, loc="left")
    logarithmic(panels[0][0], [place(point, axis) for curve in found for point in curve.points])
    panels[-1][0].set_xlabel(AXES[axis], fontsize=12)
    panels[-1][1].set_xlabel("FLOPs per forward pass, relative", fontsize=12)
    if relative:
        low, high = min([*relative, 1.0]), max([*relative, 1.0])
        margin = 0.05 * (high - low or 1.0)
        panels[0][1].set_xlim(low - margin, high + margin)
    finish(figure, list(panels.flat), results)
    handles = [Line2D([], [], **style(index), label=label) for index, label in enumerate(labels)]
    if any(curve.optimum is not None for curve in found):
        star: dict[str, Any] = {"color": "0.4", "marker": "*", "markersize": 14, "linestyle": "none"}
        handles.append(Line2D([], [], **star, label="optimum of the fitted parabola"))
    if any(_fitted(curve) is None and len(curve.points) > 1 for curve in found):
        joined: dict[str, Any] = {"color": "0.4", "linewidth": 0.9}
        handles.append(Line2D([], [], **joined, label="thin: sizes joined, no parabola with a lowest point"))
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles])
    save(figure, path)


def _relative(curve: Curve, reference: Curve | None) -> list[float]:
    if reference is None:
        return []
    return [point.cost.flops_per_token / reference.reference.flops_per_token for point in curve.points]


def _draw_by_size(panel: Any, curve: Curve, axis: str, look: dict[str, Any]) -> None:
    fitted = _fitted(curve)
    _draw_points(panel, curve, [place(point, axis) for point in curve.points], look, joined=fitted is None)
    if fitted is None:
        return
    x, losses = fitted
    panel.plot(x, losses, color=look["color"], linestyle=look["linestyle"], linewidth=1.8)
    if curve.curve is not None and curve.curve.lowest is not None and curve.optimum is not None:
        _draw_star(panel, curve.curve.lowest, curve.optimum.loss, look)


def _draw_by_flops(panel: Any, curve: Curve, axis: str, reference: Curve, look: dict[str, Any]) -> None:
    """The same losses and the same parabola, each size moved to what its forward pass costs."""
    unit, fitted = reference.reference.flops_per_token, _fitted(curve)
    costs = [point.cost.flops_per_token / unit for point in curve.points]
    _draw_points(panel, curve, costs, look, joined=fitted is None)
    if fitted is None:
        return
    x, losses = fitted
    moved = np.exp(np.interp(np.log(x), np.log([place(point, axis) for point in curve.points]), np.log(costs)))
    panel.plot(moved, losses, color=look["color"], linestyle=look["linestyle"], linewidth=1.8)
    if curve.optimum is not None:
        _draw_star(panel, curve.optimum.flops_per_token / unit, curve.optimum.loss, look)


def _fitted(curve: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """The parabola over the family. One that bends down describes nothing: the points are joined instead."""
    if curve.curve is None or curve.curve.c <= 0:
        return None
    x = np.geomspace(curve.curve.low, curve.curve.high, CURVE_POINTS)
    return x, curve.curve.at(x)


def _draw_points(panel: Any, curve: Curve, x: Sequence[float], look: dict[str, Any], joined: bool) -> None:
    """Means over seeds, with their standard deviation where there are several."""
    means, deviations = [point.mean for point in curve.points], [point.deviation for point in curve.points]
    bars = deviations if any(deviations) else None
    line = {"linestyle": look["linestyle"] if joined else "none", "linewidth": 0.9}
    panel.errorbar(x, means, yerr=bars, color=look["color"], marker=look["marker"], markersize=7, capsize=3, **line)


def _draw_star(panel: Any, x: float, loss: float, look: dict[str, Any]) -> None:
    panel.plot([x], [loss], marker="*", markersize=17, color=look["color"], markeredgecolor="white", zorder=5)
