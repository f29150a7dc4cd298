"""The paper's hyperparameter figure: loss against every varied setting, and against the FLOPs of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.drawing import finish, logarithmic, new_figure, save, style
from experiments.members import short_names, show_value
from experiments.results import Point, Results


def draw_sweep(results: Results, path: str) -> None:
    from matplotlib.ticker import MaxNLocator

    points = results.points
    paths = list(dict.fromkeys(path for point in points for path in point.member.varied))
    short = short_names(paths)
    fixed = [point for point in points if not point.member.varied]
    columns = len(paths) + 1
    figure, panels = new_figure(1, columns, (5.6 * columns + 0.6, 5.6), sharey=True)
    for panel, varied in zip(panels[0], paths, strict=False):
        _draw_varied(panel, varied, points, short)
        for index, point in enumerate(fixed):
            grey = str(0.25 + 0.35 * (index % 2))
            panel.axhline(point.mean, color=grey, linestyle=("--", ":", "-.")[index % 3], label=point.member.label)
        panel.set_xlabel(varied, fontsize=12)
        panel.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, ncols=2)
    cost = panels[0][-1]
    for index, config in enumerate(dict.fromkeys(point.member.config for point in points)):
        _draw_cost(cost, config, [point for point in points if point.member.config == config], short, style(index))
    logarithmic(cost, [point.cost.flops_per_token for point in points])
    cost.set_xlabel("forward FLOPs per token", fontsize=12)
    cost.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, ncols=2)
    panels[0][0].yaxis.set_major_locator(MaxNLocator(6))
    finish(figure, list(panels.flat), results)
    save(figure, path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _draw_varied(panel: Any, varied: str, points: Sequence[Point], short: dict[str, str]) -> None:
    """A line per configuration and values of the other settings."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        if varied in point.member.varied:
            others = [f"{short[path]}={show_value(v)}" for path, v in point.member.varied.items() if path != varied]
            lines.setdefault(" ".join([point.member.config, *others]), []).append(point)
    values = list(dict.fromkeys(show_value(point.member.varied[varied]) for group in lines.values() for point in group))
    numeric = all(_is_number(point.member.varied[varied]) for group in lines.values() for point in group)
    places = {value: float(value) if numeric else float(index) for index, value in enumerate(values)}
    for index, (label, group) in enumerate(lines.items()):
        group.sort(key=lambda point: places[show_value(point.member.varied[varied])])
        x = [places[show_value(point.member.varied[varied])] for point in group]
        _errorbar(panel, x, group, label=label, **style(index) | ({} if numeric else {"linestyle": "none"}))
    panel.set_xticks(list(places.values()), list(places))
    if not numeric:
        panel.set_xlim(-0.4, len(values) - 0.6)


def _draw_cost(panel: Any, config: str, points: Sequence[Point], short: dict[str, str], look: dict[str, Any]) -> None:
    _errorbar(panel, [p.cost.flops_per_token for p in points], points, label=config, **look | {"linestyle": "none"})
    for point in points:
        text = ", ".join(show_value(value) for value in point.member.varied.values())
        panel.annotate(
            text,
            (point.cost.flops_per_token, point.mean),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize=8,
            color="0.25",
        )


def _errorbar(panel: Any, x: Sequence[float], points: Sequence[Point], **look: Any) -> None:
    """Means over seeds, with their standard deviation where there are several."""
    deviations = [point.deviation for point in points]
    bars = deviations if any(deviations) else None
    panel.errorbar(x, [point.mean for point in points], yerr=bars, capsize=3, markersize=7, linewidth=1.8, **look)
