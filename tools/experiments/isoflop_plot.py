"""The paper's isoFLOP figure: a row per budget, loss against size on the left, against relative FLOPs on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
            kind = "optimum" if reference.optimum is not None else f"best member, {reference.best.size}"
            right.set_title(f"relative to {baseline}'s {kind}", fontsize=11, loc="left")
    logarithmic(panels[0][0], [place(point, axis) for curve in found for point in curve.points])
    panels[-1][0].set_xlabel(AXES[axis], fontsize=12)
    panels[-1][1].set_xlabel("FLOPs per forward pass, relative", fontsize=12)
    if relative:
        low, high = min([*relative, 1.0]), max([*relative, 1.0])
        margin = 0.05 * (high - low or 1.0)
        panels[0][1].set_xlim(low - margin, high + margin)
    finish(figure, list(panels.flat), results)
    handles = [Line2D([], [], **style(index), label=label) for index, label in enumerate(labels)]
    handles.append(
        Line2D([], [], color="0.4", marker="*", markersize=14, linestyle="none", label="optimum of the fitted parabola")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=11)
    save(figure, path)


def _relative(curve: Curve, reference: Curve | None) -> list[float]:
    if reference is None:
        return []
    return [point.cost.flops_per_token / reference.reference.flops_per_token for point in curve.points]


def _draw_by_size(panel: Any, curve: Curve, axis: str, look: dict[str, Any]) -> None:
    x = np.array([place(point, axis) for point in curve.points])
    _draw_points(panel, curve, x, look)
    if curve.curve is None:
        return
    fine = np.geomspace(curve.curve.low, curve.curve.high, CURVE_POINTS)
    panel.plot(fine, curve.curve.at(fine), color=look["color"], linestyle=look["linestyle"], linewidth=1.8)
    lowest = curve.curve.lowest
    if lowest is not None and curve.optimum is not None:
        _draw_star(panel, lowest, curve.optimum.loss, look)


def _draw_by_flops(panel: Any, curve: Curve, axis: str, reference: Curve, look: dict[str, Any]) -> None:
    """The same losses and the same parabola, each size moved to what its forward pass costs."""
    unit = reference.reference.flops_per_token
    x = np.array([point.cost.flops_per_token / unit for point in curve.points])
    _draw_points(panel, curve, x, look)
    if curve.curve is not None:
        places = np.log([place(point, axis) for point in curve.points])
        fine = np.geomspace(curve.curve.low, curve.curve.high, CURVE_POINTS)
        moved = np.exp(np.interp(np.log(fine), places, np.log(x)))
        panel.plot(moved, curve.curve.at(fine), color=look["color"], linestyle=look["linestyle"], linewidth=1.8)
    if curve.optimum is not None:
        _draw_star(panel, curve.optimum.flops_per_token / unit, curve.optimum.loss, look)


def _draw_points(panel: Any, curve: Curve, x: np.ndarray[Any, Any], look: dict[str, Any]) -> None:
    """Means over seeds, with their standard deviation where there are several."""
    means, deviations = [point.mean for point in curve.points], [point.deviation for point in curve.points]
    bars = deviations if any(deviations) else None
    marks = {"color": look["color"], "marker": look["marker"], "markersize": 7, "linestyle": "none", "capsize": 3}
    panel.errorbar(x, means, yerr=bars, **marks)


def _draw_star(panel: Any, x: float, loss: float, look: dict[str, Any]) -> None:
    panel.plot([x], [loss], marker="*", markersize=17, color=look["color"], markeredgecolor="white", zorder=5)
