"""One expert layer, forward and backward, beside its peers and beside a dense one of equal FLOPs, the limit.

With `--grow`, our layer alone with more tokens, more experts and more no-ops.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

from benchmarks.layers import (
    Place,
    Sizes,
    a_share,
    check_choices,
    expert_contenders,
    hold_share,
    our_layer,
    ours,
    training_contender,
)
from benchmarks.turns import gemm_peak, ratio, show_peak, show_ratio, take_turns, wait_for
from mode.config.section import ConfigError
from mode.tooling import positive_integer
from mode.training.loop.engine import start_process_group

LIMIT = "dense SwiGLU"
MANY = 32768  # tokens
GROWTH: tuple[tuple[str, list[float], dict[str, int]], ...] = (  # what grows, through which values, at which sizes
    ("tokens", [2048, 4096, 8192, 16384, MANY], {}),
    ("experts", [8, 16, 32, 64], {}),
    ("experts", [8, 16, 32, 64], {"tokens": MANY}),
    ("no-op share", [0.0, 0.25, 0.5, 0.75], {}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Sizes.add_arguments(parser)
    Place.add_arguments(parser)
    parser.set_defaults(top_k=None)  # for --grow alone
    parser.add_argument("--choices", type=positive_integer, nargs="+", metavar="K", help="of a token (default: 1 2)")
    parser.add_argument("--share", type=a_share, help="no-op share of the contender that has no-ops (default: 0.5)")
    parser.add_argument("--grow", action="store_true", help="measure our layer at growing sizes and shares instead")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.top_k is not None and not options.grow:
        raise ConfigError("--top_k", "is for --grow; without it name --choices")
    if options.choices is not None and options.grow:
        raise ConfigError("--choices", "is not for --grow; with it name --top_k")
    if options.share is not None and options.grow:
        raise ConfigError("--share", "is not for --grow, which goes through several; leave it out")
    sizes = dataclasses.replace(Sizes.read(options), top_k=options.top_k or 1)
    choices, no_op_share = options.choices or [1, 2], 0.5 if options.share is None else options.share
    for top_k in [sizes.top_k] if options.grow else choices:
        check_choices(dataclasses.replace(sizes, top_k=top_k))
    place = Place.read(options)
    start_process_group()
    about = {"repeats": options.repeats, "device": options.device, "dtype": options.dtype}
    if options.grow:
        growth = [grow(sizes, place, *what, options.repeats) for what in GROWTH]
        return {"growth": growth, "sizes": vars(sizes), **about, "gemm_peak": gemm_peak(place.device, place.dtype)}
    rows: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for top_k in choices:
        sized = dataclasses.replace(sizes, top_k=top_k)
        contenders, missing, held = expert_contenders(sized, no_op_share, place)
        failed: dict[str, str] = {}
        seconds = take_turns(contenders, options.repeats, wait_for(place.device), failed=failed)
        absent |= missing | {f"{name}, top-{top_k}": reason for name, reason in failed.items()}
        auto = ours(sized, place)
        for needed in (auto, LIMIT):
            if needed not in seconds:
                raise ConfigError(needed, f"could not be measured at these sizes: {(missing | failed)[needed]}")
        flops = expert_flops(sized)
        for name, found in seconds.items():
            share = held if "share" in name else 0.0
            rows.append(
                {
                    "top_k": top_k,
                    "contender": name,
                    "seconds": statistics.median(found),
                    "flops": flops * (1 - share),
                    "least_bytes": sized.least_bytes(place, top_k if name == LIMIT else None),
                    "times_ours": ratio(found, seconds[auto]),
                    "times_the_limit": ratio(found, seconds[LIMIT]),
                }
            )
    shape = {name: value for name, value in vars(sizes).items() if name != "top_k"}  # every row has its own
    return {
        **{"layer": rows, "absent": absent, "sizes": shape, **about},
        "gemm_peak": gemm_peak(place.device, place.dtype),
    }


def expert_flops(sizes: Sizes) -> int:
    """Without no-ops; backward is twice forward."""
    return 3 * 6 * sizes.tokens * sizes.top_k * sizes.width * sizes.hidden


def grow(
    sizes: Sizes, place: Place, name: str, values: list[float], fixed: dict[str, int], repeats: int
) -> dict[str, Any]:
    """Our layer at several sizes, in turns: time per token, and beside the first size."""
    contenders, tokens, least_bytes, flops = [], {}, {}, {}
    for value in values:
        share = value if name == "no-op share" else 0.0
        own = {} if name == "no-op share" else {name: int(value)}
        sized = dataclasses.replace(sizes, **{**fixed, **own})
        layer, x_TD = place.put(our_layer(sized, share)), sized.tokens_TD(place=place)
        held = hold_share(layer, share, x_TD.detach())
        contenders.append(training_contender(f"{value:g}", layer, x_TD))
        tokens[f"{value:g}"], least_bytes[f"{value:g}"] = sized.tokens, sized.least_bytes(place)
        flops[f"{value:g}"] = expert_flops(sized) * (1 - held)
    seconds = take_turns(contenders, repeats, wait_for(place.device))
    per_token = {value: [each / tokens[value] for each in found] for value, found in seconds.items()}
    first = per_token[f"{values[0]:g}"]
    rows = [
        {
            "value": value,
            "microseconds_per_token": statistics.median(found) * 1e6,
            "flops": flops[value],
            "least_bytes": least_bytes[value],
            "times_the_first": ratio(found, first),
        }
        for value, found in per_token.items()
    ]
    return {"what": name, "tokens": None if name == "tokens" else tokens[f"{values[0]:g}"], "rows": rows}


def table(figures: dict[str, Any]) -> str:
    if "layer" not in figures:
        return "\n\n".join(growth_table(each, figures) for each in figures["growth"])
    sizes, peak = figures["sizes"], figures["gemm_peak"]
    lines = [
        f"One expert layer, forward and backward, {figures['dtype']}, {sizes['tokens']} tokens, "
        f"width {sizes['width']}, {sizes['experts']} experts of width {sizes['hidden']}; "
        f"median of {figures['repeats']} turns. {show_peak(peak)}",
        "",
        "| top-k | layer | ms | GFLOP of experts | of the peak | MB at least | time / ours | time / dense |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["layer"]:
        share = row["flops"] / row["seconds"] / peak
        lines.append(
            f"| {row['top_k']} | {row['contender']} | {row['seconds'] * 1e3:.1f} | {row['flops'] / 1e9:.1f} | "
            f"{share:.0%} | {row['least_bytes'] / 1e6:.0f} | {show_ratio(row['times_ours'])} | "
            f"{show_ratio(row['times_the_limit'])} |"
        )
    lines += [""] + [f"Not measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    return "\n".join(lines).rstrip()


def growth_table(grown: dict[str, Any], figures: dict[str, Any]) -> str:
    sizes, name = figures["sizes"], grown["what"]
    others = [f"{grown['tokens']} tokens"] if name != "tokens" else []
    others += [f"{sizes['experts']} experts"] if name != "experts" else []
    lines = [
        f"Our layer with growing {name}, forward and backward, {figures['dtype']}; {', '.join(others)}, "
        f"width {sizes['width']}, experts of width {sizes['hidden']}, top-{sizes['top_k']}; "
        f"median of {figures['repeats']} turns. {show_peak(figures['gemm_peak'])}",
        "",
        f"| {name} | microseconds per token | GFLOP of experts | MB at least | times the first |",
        "|---|---|---|---|---|",
    ]
    for row in grown["rows"]:
        lines.append(
            f"| {row['value']} | {row['microseconds_per_token']:.2f} | {row['flops'] / 1e9:.1f} | "
            f"{row['least_bytes'] / 1e6:.0f} | {show_ratio(row['times_the_first'])} |"
        )
    return "\n".join(lines)
