"""What both pictures share: styles, numbers on logarithmic axes, the loss axis and the legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from comparing.plot import COLOURS, MARKERS, STYLES

from experiments.results import Results

MOST_TICKS = 8
NARROWEST = 1.1  # the ends of an axis of sizes, by one another: two numbers that differ by less read the same
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, ""))


def style(index: int) -> dict[str, Any]:
    """A colour, a line and a marker; where colours repeat, the marker is another."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": STYLES[index % len(STYLES)],
        "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
    }


def show_number(value: float) -> str:
    """1234567 as 1.23M."""
    size, unit = next(((size, unit) for size, unit in UNITS if value >= size), UNITS[-1])
    return f"{value / size:.3g}{unit}"


def logarithmic(panel: Any, values: Sequence[float]) -> None:
    """An x axis with a few readable numbers. Sizes that differ by next to nothing stand in one place."""
    low, high = min(values), max(values)
    panel.set_xscale("log")
    if high / low < NARROWEST:
        panel.set_xlim(low / 2, high * 2)
        ticks = np.array([low])
    else:
        margin = (high / low) ** 0.06
        panel.set_xlim(low / margin, high * margin)
        ticks = np.array(_apart(values, least=(high / low) ** (1 / MOST_TICKS)))
    panel.set_xticks(ticks, [show_number(tick) for tick in ticks])
    panel.minorticks_off()


def _apart(values: Sequence[float], least: float) -> list[float]:
    """The values themselves, without those within the factor `least` of one before."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value >= kept[-1] * least:
            kept.append(value)
    return kept


def finish(figure: Any, panels: Sequence[Any], results: Results) -> None:
    """The look of all panels, and what the loss on the left of each row is."""
    which = "\ncausal where depth-routed" if results.causal else ""
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=10)
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel(f"validation loss ({results.unit}){which}", fontsize=11)


def new_figure(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)


def save(figure: Any, path: str) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
