"""One expert layer, forward and backward, beside its peers and beside a dense one of equal FLOPs, the limit.

With `--grow`, our layer alone with more tokens and more experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from benchmarks.layers import Sizes, expert_contenders, our_layer, training_contender
from benchmarks.turns import gemm_peak, ratio, show_ratio, take_turns
from mode.training.engine import start_process_group

OURS, LIMIT = "mode, grouped_mm", "dense SwiGLU"
GROWTH: dict[str, list[int]] = {"tokens": [2048, 4096, 8192, 16384, 32768], "experts": [8, 16, 32, 64]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Sizes.add_arguments(parser)
    parser.add_argument("--choices", type=int, nargs="+", default=[1, 2], metavar="K", help="instead of --top_k")
    parser.add_argument("--share", type=float, default=0.5, help="no-op share of the contender that has no-ops")
    parser.add_argument("--grow", action="store_true", help="measure our layer at growing sizes instead")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    start_process_group()
    sizes = Sizes.read(options)
    if options.grow:
        return {name: grow(sizes, name, values, options.repeats) for name, values in GROWTH.items()}
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for top_k in options.choices:
        sized = dataclasses.replace(sizes, top_k=top_k)
        contenders, missing = expert_contenders(sized, options.share)
        absent |= missing
        seconds = take_turns(contenders, options.repeats)
        flops = 3 * 6 * sized.tokens * top_k * sized.width * sized.hidden  # of the experts; backward is twice forward
        for name, found in seconds.items():
            share = options.share if "share" in name else 0.0
            rows.append(
                {
                    "top_k": top_k,
                    "contender": name,
                    "seconds": statistics.median(found),
                    "flops": flops * (1 - share),
                    "times_ours": ratio(found, seconds[OURS]),
                    "times_the_limit": ratio(found, seconds[LIMIT]),
                }
            )
    return {"layer": rows, "absent": absent, "sizes": vars(sizes), "repeats": options.repeats, "gemm_peak": gemm_peak()}


def grow(sizes: Sizes, name: str, values: list[int], repeats: int) -> list[dict[str, Any]]:
    """Our layer at several sizes, in turns: time per token, and beside the first size."""
    sized = [dataclasses.replace(sizes, **{name: value}) for value in values]
    contenders = [training_contender(str(getattr(s, name)), our_layer(s), s.tokens_TD()) for s in sized]
    seconds = take_turns(contenders, repeats)
    per_token = {str(getattr(s, name)): [t / s.tokens for t in seconds[str(getattr(s, name))]] for s in sized}
    first = per_token[str(values[0])]
    return [
        {
            name: value,
            "microseconds_per_token": statistics.median(per_token[str(value)]) * 1e6,
            "times_the_first": ratio(per_token[str(value)], first),
        }
        for value in values
    ]


def table(figures: dict[str, Any]) -> str:
    if "layer" not in figures:
        return "\n\n".join(growth_table(name, rows) for name, rows in figures.items())
    sizes, peak = figures["sizes"], figures["gemm_peak"]
    lines = [
        f"One expert layer, forward and backward, fp32, {sizes['tokens']} tokens, width {sizes['width']}, "
        f"{sizes['experts']} experts of width {sizes['hidden']}; median of {figures['repeats']} turns. "
        f"Peak of a matrix product here and now: {peak / 1e9:.0f} GFLOP/s.",
        "",
        "| top-k | layer | ms | GFLOP of experts | of the peak | time / ours | time / dense |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in figures["layer"]:
        share = row["flops"] / row["seconds"] / peak
        lines.append(
            f"| {row['top_k']} | {row['contender']} | {row['seconds'] * 1e3:.1f} | {row['flops'] / 1e9:.1f} | "
            f"{share:.0%} | {show_ratio(row['times_ours'])} | {show_ratio(row['times_the_limit'])} |"
        )
    lines += [""] + [f"Not measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    return "\n".join(lines).rstrip()


def growth_table(name: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"| {name} | microseconds per token | times the first |", "|---|---|---|"]
    for row in rows:
        lines.append(f"| {row[name]} | {row['microseconds_per_token']:.2f} | {show_ratio(row['times_the_first'])} |")
    return "\n".join(lines)
