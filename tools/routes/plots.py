"""The pictures of a report, as matplotlib figures. Colours are Okabe and Ito's or run from light to dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from mode.transformer.generation.page import ink

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#BBBBBB"
MARKERS = {"top_k": ("o", "black"), "predictor": ("^", ORANGE), "router": ("s", GREEN)}
NAMES = {"top_k": "top-k", "predictor": "predictor", "router": "router logit"}
MOST_NUMBERS = 16  # experts, up to which the load is written into the cells


def decisions(work_XL: NDArray[np.float64], top_k: int | None, has_no_ops: bool, title: str) -> Figure:
    """Tokens across, blocks upward. `top_k` is the number of expert choices; None: a dense feed-forward."""
    num_layers, length = work_XL.shape
    figure = Figure(figsize=(min(22, max(9.0, length / 22)), 1.9 + 0.28 * num_layers), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["YlGnBu"]
    shades = colours(0.05 + 0.9 * work_XL)
    axes.imshow(shades, aspect="auto", origin="lower", interpolation="none" if length <= 1024 else "antialiased")
    axes.set_yticks(np.arange(num_layers + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.set(xlabel="token (position in the sequence)", ylabel="block", title=title)
    if top_k is None or not has_no_ops:
        entries = [(1.0, "processed by the block")]
    else:
        entries = [(0.5, "attention, no-op" if top_k == 1 else "attention, no-ops only")]
        for k in range(1, top_k + 1):
            words = "an expert" if k == top_k == 1 else f"{k} of {top_k} experts"
            entries.append((0.5 + 0.5 * k / top_k, f"attention and {words}"))
    if (work_XL == 0).any():
        entries.insert(0, (0.0, "skipped the block"))
    patches = [
        Patch(facecolor=colours(0.05 + 0.9 * level), edgecolor="#555555", label=label) for level, label in entries
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 5), frameon=False)
    return figure


def router_weights(depth: dict[str, Any], title: str) -> Figure:
    """The histogram of all routed blocks together, and each block's shares beside it."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    edges, counts = np.array(depth["histogram"]["edges"]), np.array(depth["histogram"]["counts"])
    above = edges[:-1] >= 0.5
    shares, width = counts / counts.sum(), edges[1] - edges[0]
    share, capacity = depth["above_half"], depth["capacity_fraction"]
    for side, colour, hatch, label in (
        (~above, GREY, "", f"at most 0.5: {1 - share:.1%}"),
        (above, BLUE, "//", f"above 0.5: {share:.1%} (capacity {capacity:.1%})"),
    ):
        left.bar(
            edges[:-1][side],
            shares[side],
            width,
            align="edge",
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=label,
        )
    left.axvline(0.5, color="black", linestyle="--", linewidth=1)
    left.set(
        xlim=(0, 1),
        xlabel="router weight: sigmoid of the logit" + (" (noise)" if depth["selection"] == "stochastic" else ""),
        ylabel="share of the router weights",
        title=title,
    )
    left.set_ylim(0, left.get_ylim()[1] * 1.2)  # room for the legend
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.legend(framealpha=1, edgecolor="white", loc="upper right", fontsize=9)
    _block_shares(right, depth)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _block_shares(axes: Axes, depth: dict[str, Any]) -> None:
    layers = list(depth["blocks"])
    places = np.arange(len(layers))
    axes.bar(
        places,
        [block["above_half"] for block in depth["blocks"].values()],
        color=BLUE,
        hatch="//",
        edgecolor="white",
        label="router weight above 0.5",
    )
    passes = list(next(iter(depth["blocks"].values()))["kept"])
    for offset, name in zip(np.linspace(-0.2, 0.2, len(passes)), passes, strict=True):
        marker, colour = MARKERS[name]
        kept = [block["kept"][name] for block in depth["blocks"].values()]
        axes.plot(
            places + offset,
            kept,
            marker,
            color=colour,
            markeredgecolor="white",
            markersize=8,
            label=f"kept, {NAMES[name]}",
        )
    axes.axhline(depth["capacity_fraction"], color="black", linestyle="--", linewidth=1, label="capacity")
    axes.set(xlabel="routed block", ylabel="share of the tokens", title="Each routed block")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)  # room for the legend
    axes.set_xticks(places, layers)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)


def predictor(
    steps: Sequence[int], accuracy: Sequence[float], kept: Sequence[float], depth: dict[str, Any], title: str
) -> Figure:
    """How often the predictor agreed with top-k in training, between what skipping all and the best threshold reach."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, accuracy, "o-", color=BLUE, markersize=4, label="predictor, mean of the routed blocks")
    skipped = 1 - np.array(kept)
    best = float(np.mean([block["best_threshold"]["agrees"] for block in depth["blocks"].values()]))
    axes.axhline(best, color=ORANGE, linestyle="--", label=f"best threshold of the router's logit now: {best:.1%}")
    axes.plot(steps, skipped, ":", color="black", label=f"who always skips: {skipped[-1]:.1%} at the end")
    axes.set(xlabel="step", ylabel="agrees with top-k about a token", title=title)
    axes.set_ylim(min(skipped[-1], *accuracy) - 0.01, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(frameon=False, loc="best")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


WORK_NAMES = {
    "blocks": "routed blocks that kept the token",
    "real_choices": "choices of the token that went to real experts",
}


def entropy(relations: dict[str, Any], title: str) -> Figure:
    """For every amount of work the middle half of the tokens; their number n stands above."""
    figure = Figure(figsize=(6.2 * len(relations), 4.8), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(relations), squeeze=False)[0]
    for axes, (name, relation) in zip(panels, relations.items(), strict=True):
        groups = relation["groups"]
        counts = np.array([group["count"] for group in groups])
        low, middle, high = np.array([group["quartiles"] for group in groups]).T
        means = np.array([group["mean"] for group in groups])
        axes.bar(
            counts, high - low, 0.7, bottom=low, color="#A6CEE3", edgecolor=BLUE, label="middle half of the tokens"
        )
        axes.hlines(middle, counts - 0.35, counts + 0.35, color=BLUE, linewidth=2.5, label="median")
        axes.plot(counts, means, "D", color=ORANGE, markeredgecolor="black", label="mean")
        bottom, top = min(low.min(), means.min()), max(high.max(), means.max())
        span, crowded = max(top - bottom, 1e-3), len(groups) > 9
        for group in groups:
            place = (group["count"], top + 0.06 * span)
            axes.text(*place, f"n={group['tokens']:,}", ha="center", fontsize=8, rotation=90 if crowded else 0)
        correlation = relation["rank_correlation"]
        shown = "undefined" if correlation is None else f"{correlation:+.3f}"
        axes.set(
            xlabel=WORK_NAMES[name],
            ylabel="entropy of the next token (nats)",
            title=f"rank correlation {shown}",
            ylim=(max(0, bottom - 0.1 * span), top + (0.3 if crowded else 0.14) * span),
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def expert_load(experts: dict[str, Any], title: str) -> Figure:
    """Each real expert's load beside an even one, and the share of no-ops."""
    blocks, num_experts = experts["blocks"], experts["num_experts"]
    load_XE = np.array([block["choices"][:num_experts] for block in blocks.values()], dtype=np.float64)
    even_X1 = np.maximum(load_XE.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(12, 1.9 + 0.36 * len(blocks)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    image = left.imshow(load_XE / even_X1, aspect="auto", origin="lower", cmap="YlGnBu", vmin=0)
    figure.colorbar(image, ax=left, label="load / even load", pad=0.01)
    if num_experts <= MOST_NUMBERS:
        for (layer, expert), value in np.ndenumerate(load_XE / even_X1):
            red, green, blue, _ = (int(part) for part in image.to_rgba(value, bytes=True))
            letters = "white" if ink((red, green, blue)) == (255, 255, 255) else "black"
            left.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=letters)
    left.set(xlabel="real expert", ylabel="block", title=title)
    left.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    left.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    places, no_op = np.arange(len(blocks)), np.array([block["no_op_share"] for block in blocks.values()])
    right.barh(places, 1 - no_op, color=BLUE, edgecolor="white", label="real experts")
    if experts["num_no_ops"]:
        right.barh(places, no_op, left=1 - no_op, color=GREY, hatch="//", edgecolor="white", label="no-ops")
    if experts["no_op_fraction"]:
        right.axvline(1 - experts["no_op_fraction"], color="black", linestyle="--", linewidth=1, label="target")
    for place, block in enumerate(blocks.values()):
        shown = "-" if block["imbalance"] is None else f"{block['imbalance']:.2f}"
        right.text(1.22, place, shown, ha="center", va="center", fontsize=9)
    right.annotate("max/mean", (1.22, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9)
    right.set(xlim=(0, 1.4), xlabel="share of the choices")
    right.set_title("Choices of each block, and its load imbalance", pad=18)
    right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    right.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=3, frameon=False)
    return figure
