"""The paper's hyperparameter figure: loss against every varied setting, and against the FLOPs of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.drawing import finish, logarithmic, new_figure, save, style
from experiments.members import short_names, show_value
from experiments.results import Point, Results

FIXED_STYLES = (("0.2", "--", "X"), ("0.5", ":", "P"), ("0.35", "-.", "d"))  # colour, line and marker

Lines = dict[str, list[Point]]


def draw_sweep(results: Results, path: str) -> None:
    """A panel per setting, each with colours of its own; the last one has the lines of the first."""
    points = results.points
    paths = list(dict.fromkeys(varied for point in points for varied in point.member.varied))
    fixed = [point for point in points if not point.member.varied]
    columns = len(paths) + 1
    figure, panels = new_figure(1, columns, (5.6 * columns + 0.6, 5.6), sharey=True)
    used = 0
    for panel, varied in zip(panels[0], paths, strict=False):
        lines = lines_along(varied, points, short_names(paths))
        _draw_setting(panel, varied, lines, used)
        for index, point in enumerate(fixed):
            colour, line, _ = FIXED_STYLES[index % len(FIXED_STYLES)]
            panel.axhline(point.mean, color=colour, linestyle=line, label=point.member.label)
        panel.set_xlabel(varied, fontsize=12)
        used += len(lines)
    first = lines_along(paths[0], points, short_names(paths)) if paths else {}
    _draw_cost(panels[0][-1], first, fixed, points, joined=bool(paths) and is_numeric(paths[0], first))
    for panel in panels[0]:
        panel.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, ncols=2)
    finish(figure, list(panels.flat), results)
    save(figure, path)


def lines_along(varied: str, points: Sequence[Point], short: dict[str, str]) -> Lines:
    """The points that vary a setting, by configuration and values of the other settings; numbers in order."""
    lines: Lines = {}
    for point in points:
        if varied in point.member.varied:
            others = [f"{short[path]}={show_value(v)}" for path, v in point.member.varied.items() if path != varied]
            lines.setdefault(" ".join([point.member.config, *others]), []).append(point)
    if is_numeric(varied, lines):
        for group in lines.values():
            group.sort(key=lambda point: point.member.varied[varied])
    return lines


def is_numeric(varied: str, lines: Lines) -> bool:
    values = [point.member.varied[varied] for group in lines.values() for point in group]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _draw_setting(panel: Any, varied: str, lines: Lines, used: int) -> None:
    """Along its numbers, or side by side where the setting is no number."""
    values = list(dict.fromkeys(show_value(point.member.varied[varied]) for group in lines.values() for point in group))
    numeric = is_numeric(varied, lines)
    places = {value: float(value) if numeric else float(index) for index, value in enumerate(values)}
    for index, (label, group) in enumerate(lines.items(), start=used):
        x = [places[show_value(point.member.varied[varied])] for point in group]
        _errorbar(panel, x, group, label=label, **style(index) | ({} if numeric else {"linestyle": "none"}))
    panel.set_xticks(list(places.values()), list(places))
    if not numeric:
        panel.set_xlim(-0.4, len(values) - 0.6)


def _draw_cost(panel: Any, lines: Lines, fixed: Sequence[Point], points: Sequence[Point], joined: bool) -> None:
    """The first setting's lines, and what varies other settings only, by configuration."""
    drawn = {id(point) for group in lines.values() for point in group} | {id(point) for point in fixed}
    rest: Lines = {}
    for point in points:
        if id(point) not in drawn:
            rest.setdefault(point.member.config, []).append(point)
    for index, (label, group) in enumerate([*lines.items(), *rest.items()]):
        x = [point.cost.flops_per_token for point in group]
        line = {} if joined and index < len(lines) else {"linestyle": "none"}
        _errorbar(panel, x, group, label=label, **style(index) | line)
    for index, point in enumerate(fixed):
        colour, _, marker = FIXED_STYLES[index % len(FIXED_STYLES)]
        look = {"color": colour, "marker": marker, "linestyle": "none"}
        _errorbar(panel, [point.cost.flops_per_token], [point], label=point.member.label, **look)
    logarithmic(panel, [point.cost.flops_per_token for point in points])
    panel.set_xlabel("forward FLOPs per token", fontsize=12)


def _errorbar(panel: Any, x: Sequence[float], points: Sequence[Point], **look: Any) -> None:
    """Means over seeds, with their standard deviation where there are several."""
    deviations = [point.deviation for point in points]
    bars = deviations if any(deviations) else None
    panel.errorbar(x, [point.mean for point in points], yerr=bars, capsize=3, markersize=7, linewidth=1.8, **look)
