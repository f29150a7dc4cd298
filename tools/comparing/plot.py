"""The counted losses of variants against training FLOPs and time, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from comparing.comparable import Comparability
from mode.runs import Run, Variant

# Okabe and Ito's colours, which most colour-blind people tell apart, without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LEGEND_LETTERS, LEGEND_MARK = 120, 8  # of a line below a picture; what a line's mark takes of them
LEGEND_LINE = 0.24  # inches
TIME_UNITS = ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def draw(variants: Sequence[Variant], common: Comparability, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")  # grows with its legend
    runs = [run for variant in variants for run in variant.runs]
    for panel, axis in zip(panels, ("flops", "seconds"), strict=True):
        size, unit = _unit(runs, axis)
        for index, variant in enumerate(variants):
            _draw_variant(panel, variant, axis, size, common, index)
        panel.set_xlabel(f"training {'FLOPs' if axis == 'flops' else 'time'} ({unit})", fontsize=12)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=10)
    causal = sum(run.loss_tag == "loss/val_causal" for run in runs)
    which = "" if not causal else "\ncausal" if causal == len(runs) else "\ncausal where depth-routed"
    panels[0].set_ylabel(f"validation loss ({common.unit}){which}", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        legend_below(figure, handles, labels)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """As many side by side as fit below a picture of 12 inches, which grows by every line but the first two."""
    columns = max(1, min(len(labels), LEGEND_LETTERS // (max(map(len, labels)) + LEGEND_MARK)))
    lines = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, lines - 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=11)


def _unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    ends = [span[1] for run in runs if (span := run.counted.span(axis)) is not None]
    most = max(ends, default=1.0)
    if axis == "flops":
        power = max(0, math.floor(math.log10(most)))
        return 10.0**power, f"$10^{{{power}}}$"
    return next((size, name) for limit, size, name in TIME_UNITS if most >= limit)


def _draw_variant(panel: Any, variant: Variant, axis: str, size: float, common: Comparability, index: int) -> None:
    """One line with marks at the evaluations; of several seeds their mean, and each of them as a thin line."""
    style = {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[index % len(STYLES)],
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],  # another one when colours repeat
        "linewidth": 2,
        "markersize": 6,
    }
    curves = [(run.counted, common.scale(run)) for run in variant.runs]
    curves = [(curve, scale) for curve, scale in curves if curve.span(axis) is not None]
    if len(curves) == 1:
        curve, scale = curves[0]
        panel.plot(curve.x[axis] / size, curve.loss * scale, label=variant.label, **style)
        return
    for curve, scale in curves:
        panel.plot(curve.x[axis] / size, curve.loss * scale, color=style["color"], linewidth=0.8, alpha=0.5)
    spans = [curve.x[axis] for curve, _ in curves]
    if not spans:
        return
    low, high = max(x[0] for x in spans), min(x[-1] for x in spans)
    first = spans[0]
    if low > high:
        return
    places = np.unique(np.concatenate([first[(first >= low) & (first <= high)], [low, high]]))
    mean = [np.mean([curve.at(axis, x) * scale for curve, scale in curves]) for x in places]
    panel.plot(places / size, mean, label=f"{variant.label} (mean of {len(curves)} seeds)", **style)
