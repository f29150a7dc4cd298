"""The figures of a comparison as tables, for the terminal and in Markdown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comparing.matching import AXIS_NAMES, NEARLY_THROUGH, Figures

GIB = 2**30
WIDTH = 120  # of prose on the terminal


def wrap(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [self.title]
        for row in (self.header, *self.rows):
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join([*lines, *([wrap(self.note)] if self.note else [])])

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "|---" + "|---:" * (len(self.header) - 1) + "|"
        parts = [f"### {self.title[:1].upper()}{self.title[1:]}", "", line(self.header), rule, *map(line, self.rows)]
        return "\n".join([*parts, *(["", self.note] if self.note else [])])


def tables(figures: Figures) -> list[Table]:
    found = [_runs(figures), _losses(figures), _costs(figures)]
    found += [_points(figures, axis) for axis, matched in figures["matched"].items() if len(matched["points"]) > 1]
    if any(len(variant["seeds"]) > 1 for variant in figures["variants"]):
        found.append(_seeds(figures))
    return found


def _runs(figures: Figures) -> Table:
    rows = []
    for run in figures["runs"]:
        step = f"{run['step']:,.0f}" + ("" if run["finished"] else f" of {run['planned_steps'] or '?'}")
        diverged = "" if run["diverged_at"] is None else f", not finite from step {run['diverged_at']} on"
        state = ("finished" if run["finished"] else "stopped early or running") + diverged
        cells = [run["directory"], run["variant"], str(run["seed"]), state, step, f"{run['tokens']:,.0f}"]
        best = "-" if run["best"] is None else f"{run['best']:.4f} @ {run['best_step']}"
        rows.append([*cells, _flops(run["flops"]), show_time(run["seconds"]), _plain(run["final"], ".4f"), best])
    header = ["run", "variant", "seed", "state", "steps", "tokens", "FLOPs", "time", "final", "best @ step"]
    about = "time: training alone, without evaluation, saving and the pauses of resumed runs"
    return Table("runs", header, rows, about)


def _losses(figures: Figures) -> Table:
    matched = figures["matched"]
    rows = []
    for variant in figures["variants"]:
        cells = [variant["label"], show_spread(variant["final"], ".4f"), show_spread(variant["best"], ".4f")]
        cells += [show_spread(variant[name], ".4f") for name in ("final_causal", "final_top_k")]
        for axis in AXIS_NAMES:
            points = matched[axis]["points"]
            cells.append(show_spread(points[-1]["loss"][variant["label"]], ".4f") if points else "-")
        rows.append(cells)
    ends = [f"{name} = {_place(axis, matched[axis])}" for axis, name in AXIS_NAMES.items()]
    header = ["variant", "final", "best", "causal", "top-k", *(f"equal {axis}" for axis in _SHORT.values())]
    counted = "counted: causal where depth-routed, as top-k sees the future"
    return Table(f"validation loss, {figures['unit']} ({counted})", header, rows, "equal at " + ", ".join(ends))


_SHORT = {"steps": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "time"}


def _costs(figures: Figures) -> Table:
    rows = []
    for variant in figures["variants"]:
        shares = ("no_op_share", "dropped_share", "kept_share", "kept_share_causal")
        rows.append(
            [
                variant["label"],
                f"{variant['parameters'] / 1e6:,.2f}M",
                f"{variant['active_parameters'] / 1e6:,.2f}M",
                _mean(variant["flops_per_token"], ".3e"),
                show_spread(variant["tokens_per_second"], ",.0f"),
                show_spread(variant["step_seconds"], ",.1f", 1e3),
                _mean(variant["peak_memory_bytes"], ",.2f", 1 / GIB),
                *(_mean(variant[name], ".1%") for name in shares),
            ]
        )
    header = ["variant", "parameters", "active", "training FLOPs/token", "tokens/s", "step ms", "memory GiB"]
    header += ["no-op", "dropped", "kept", "kept causal"]
    about = (
        "step ms: median; tokens/s: of the whole training time; memory: peak of the fullest rank; no-op and dropped "
        "are of all choices, kept is of the tokens of routed blocks: means of the second half of the logged steps"
    )
    return Table("cost", header, rows, about)


def _points(figures: Figures, axis: str) -> Table:
    points = figures["matched"][axis]["points"]
    rows = [
        [variant["label"], *(show_spread(point["loss"][variant["label"]], ".4f") for point in points)]
        for variant in figures["variants"]
    ]
    form = {"steps": ",.0f", "tokens": ",.0f", "flops": ".3e"}
    header = ["variant", *(show_time(p["at"]) if axis == "seconds" else f"{p['at']:{form[axis]}}" for p in points)]
    return Table(f"counted loss at equal {AXIS_NAMES[axis]}, {figures['unit']}", header, rows)


def _seeds(figures: Figures) -> Table:
    axis = figures["axis"]
    points = figures["matched"][axis]["points"]
    rows = []
    for variant in figures["variants"]:
        final, equal = variant["final"], points[-1]["loss"][variant["label"]] if points else None
        cells = [variant["label"], ", ".join(map(str, variant["seeds"]))]
        for loss in (final, equal):
            cells += [_plain(loss and loss[name], ".4f") for name in ("mean", "std", "min", "max")]
        rows.append(cells)
    names = ("mean", "std", "min", "max")
    header = ["variant", "seeds", *(f"final {n}" for n in names), *(f"{n} at equal {_SHORT[axis]}" for n in names)]
    return Table("seeds", header, rows, "std: sample standard deviation over seeds; one seed has none")


# ---------------------------------------------------------------------------------------------------
# The whole report


def render(figures: Figures, markdown: bool) -> str:
    parts = [f"**WARNING**: {text}" if markdown else wrap(f"WARNING: {text}") for text in figures["warnings"]]
    parts += [table.markdown() if markdown else table.text() for table in tables(figures)]
    notes = [f"{run['directory']}: {note}" for run in figures["runs"] for note in run["notes"]]
    notes += [
        f"{folder} is not finished: its losses are in no mean but those at equal {', '.join(_SHORT.values())}"
        for variant in figures["variants"]
        for folder in variant["left_out"]
    ]
    notes += dict.fromkeys(text for matched in figures["matched"].values() for text in matched["problems"])
    sections = {"notes": notes, "config differences": _differences(figures), "verdict": _verdicts(figures)}
    sections["assertions"] = [
        f"assert_{item['assert']} {'holds' if item['holds'] else 'FAILS'}: {item['text']}"
        for item in figures.get("assertions", [])
    ]
    for title, lines in sections.items():
        if lines:
            heading = f"### {title.capitalize()}\n\n" if markdown else f"{title}\n"
            parts.append(heading + "\n".join(f"- {line}" if markdown else wrap(line) for line in lines))
    return "\n\n".join(parts)


def _verdicts(figures: Figures) -> list[str]:
    lines = [verdict["text"] for verdict in figures["verdicts"]]
    points = figures["matched"][figures["axis"]]["points"]
    if len(lines) > 1 and points:
        losses = {label: loss["mean"] for label, loss in points[-1]["loss"].items() if loss is not None}
        shares = points[-1]["through"]
        order = ", ".join(
            f"{label} {loss:.4f}{_still_early(shares[label])}"
            for label, loss in sorted(losses.items(), key=lambda item: item[1])
        )
        lines.append(
            f"from the lowest loss to the highest where all have the same {AXIS_NAMES[figures['axis']]}: {order}"
        )
    return lines


def _still_early(share: float | None) -> str:
    return "" if share is None or share >= NEARLY_THROUGH else f" (through {share:.0%} of its steps)"


def _differences(figures: Figures) -> list[str]:
    lines = []
    for path, values in figures["differences"].items():
        holders: dict[str, list[str]] = {}
        for label, value in values.items():
            holders.setdefault(json.dumps(value), []).append(label)
        lines.append(f"{path}: " + "; ".join(f"{', '.join(labels)} = {value}" for value, labels in holders.items()))
    return lines


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _mean(figure: Figures | None, form: str, factor: float = 1.0) -> str:
    return "-" if figure is None else f"{figure['mean'] * factor:{form}}"


def show_spread(figure: Figures | None, form: str, factor: float = 1.0) -> str:
    """A mean, and its standard deviation over seeds."""
    mean = _mean(figure, form, factor)
    return mean if figure is None or figure["std"] is None else f"{mean} +- {figure['std'] * factor:{form}}"


def _flops(value: float | None) -> str:
    return _plain(value, ".3e")


def show_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (float("inf"), 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.4g} {unit}"
    raise AssertionError


def _place(axis: str, matched: dict[str, Any]) -> str:
    if not matched["points"]:
        return "none"
    at = matched["points"][-1]["at"]
    return {"steps": f"{at:,.0f}", "tokens": f"{at:,.0f}", "flops": f"{at:.3e}", "seconds": show_time(at)}[axis]
