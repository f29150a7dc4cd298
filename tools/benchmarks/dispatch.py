"""Expert parallelism beside DeepSpeed's own expert layer: bytes sent, and time, forward and backward."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.layers import (
    CAPACITY,
    Sizes,
    a_share,
    check_choices,
    hold_share,
    native_layer,
    our_config,
    our_parallel_layer,
    training_contender,
)
from benchmarks.turns import gemm_peak, ratio, show_peak, show_ratio, take_turns
from mode import accounting
from mode.accounting import BlockCounts
from mode.config.section import ConfigError
from mode.host import keep_freed_memory
from mode.local_ranks import run_on_ranks
from mode.tooling import positive_integer
from mode.training.loop.engine import start_process_group

OURS, NATIVE, REDUCED = "mode", "deepspeed", "deepspeed, reduced capacity"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Sizes.add_arguments(parser, tokens=2048)
    parser.add_argument("--ranks", type=positive_integer, nargs="+", default=[2, 4])
    parser.add_argument("--shares", type=a_share, nargs="+", default=[0.0, 0.25, 0.5, 0.75], metavar="SHARE")


def dispatch_on_a_rank(sizes: Sizes, shares: list[float], repeats: int) -> list[dict[str, Any]]:
    """Bytes and times of one expert layer, forward and backward, ours and DeepSpeed's own, for every no-op share."""
    keep_freed_memory()
    start_process_group()
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    x_TD = sizes.tokens_TD(seed=rank)
    native = native_layer(sizes)
    found = []
    for share in shares:
        layer = our_parallel_layer(sizes, share)
        hold_share(layer, share, x_TD.detach())
        reduced = native_layer(sizes, CAPACITY * (1 - share))
        contenders = [
            training_contender(OURS, layer, x_TD),
            training_contender(NATIVE, native, x_TD),
            training_contender(REDUCED, reduced, x_TD),
        ]
        routing = layer.router(x_TD, (1, len(x_TD)))
        processed, no_op = int(routing.num_processed()), int(routing.num_no_op())
        counts = BlockCounts(1, sizes.tokens, sizes.tokens, sizes.tokens, processed, no_op, 0)
        failed: dict[str, str] = {}  # on all ranks alike: it is the sizes that DeepSpeed's layer may not take
        seconds = take_turns(contenders, repeats, distributed.barrier, quiet=rank != 0, failed=failed)
        if OURS in failed:
            raise RuntimeError(failed[OURS])
        found.append(
            {
                "no_op": no_op,
                "processed": processed,
                "accounting": accounting.all_to_all_bytes(our_config(sizes), counts, element_size=4),
                "bytes": {each.name: sum(bytes_sent(each.run)) for each in contenders if each.name in seconds},
                "seconds": seconds,
                "failed": failed,
            }
        )
    return found


def bytes_sent(run: Callable[[], None]) -> list[int]:
    """What this rank hands to each all-to-all of one run. Tables of counts, which are whole numbers, are left out."""
    sent: list[int] = []
    real = distributed.all_to_all_single

    def counting(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:
        if input.is_floating_point():
            sent.append(input.numel() * input.element_size())
        return real(output, input, *arguments, **options)

    distributed.all_to_all_single = counting
    try:
        run()
    finally:
        distributed.all_to_all_single = real
    return sent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes.read(options)
    check_choices(sizes)
    for num_ranks in options.ranks:
        if sizes.experts % num_ranks:
            raise ConfigError("--ranks", f"has {num_ranks}, which does not divide --experts {sizes.experts}")
    rows = []
    absent: dict[str, str] = {}
    for num_ranks in options.ranks:
        print(f"{num_ranks} ranks ...", file=sys.stderr)
        by_rank = run_on_ranks(dispatch_on_a_rank, num_ranks, sizes, options.shares, options.repeats)
        for ranks in zip(*by_rank, strict=True):
            # The first all-to-all carries what the rank sends, the second what it answers: one adds up to the other.
            sent = {name: sum(rank["bytes"][name] for rank in ranks) for name in ranks[0]["bytes"]}
            seconds = ranks[0]["seconds"]
            medians = {name: statistics.median(found) for name, found in seconds.items()}
            ratios = {name: ratio(found, seconds[OURS]) for name, found in seconds.items()}
            absent |= {f"{name}, {num_ranks} ranks": reason for name, reason in ranks[0]["failed"].items()}
            rows.append(
                {
                    "ranks": num_ranks,
                    "no_op_share": sum(rank["no_op"] for rank in ranks)
                    / sum(rank["no_op"] + rank["processed"] for rank in ranks),
                    "flops": 3 * 6 * sum(rank["processed"] for rank in ranks) * sizes.width * sizes.hidden,
                    "bytes": sent[OURS],
                    "accounting": 4 * sum(rank["accounting"] for rank in ranks),
                    "native_bytes": sent.get(NATIVE),
                    "native_reduced_bytes": sent.get(REDUCED),
                    "seconds": medians[OURS],
                    "native_seconds": medians.get(NATIVE),
                    "native_reduced_seconds": medians.get(REDUCED),
                    "times_native": ratios.get(NATIVE),
                    "times_native_reduced": ratios.get(REDUCED),
                }
            )
    about = {"sizes": vars(sizes), "repeats": options.repeats, "gemm_peak": gemm_peak()}
    return {"dispatch": rows, "absent": absent, **about}


def table(figures: dict[str, Any]) -> str:
    settings = figures["sizes"]
    lines = [
        f"One expert layer, forward and backward, fp32: {settings['tokens']} tokens a rank, width {settings['width']}, "
        f"{settings['experts']} experts of width {settings['hidden']}, top-{settings['top_k']}; four all-to-alls, all "
        f"ranks together. DeepSpeed's own layer at capacity {CAPACITY} and, reduced, at {CAPACITY} x (1 - share), "
        f"where it drops what does not fit. Median of {figures['repeats']} turns. " + show_peak(figures["gemm_peak"]),
        "",
        "| ranks | no-op share | GFLOP of experts | MB sent | accounting | DeepSpeed | reduced "
        "| ms | DeepSpeed | reduced | times ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["dispatch"]:
        sent = [row[name] for name in ("bytes", "accounting", "native_bytes", "native_reduced_bytes")]
        times = [row[name] for name in ("seconds", "native_seconds", "native_reduced_seconds")]
        lines.append(
            f"| {row['ranks']} | {row['no_op_share']:.3f} | {row['flops'] / 1e9:.1f} | "
            + " | ".join("-" if value is None else f"{value / 1e6:.3f}" for value in sent)
            + " | "
            + " | ".join("-" if value is None else f"{value * 1e3:.1f}" for value in times)
            + f" | {'-' if row['times_native'] is None else show_ratio(row['times_native'])} |"
        )
    lines += [f"\nNot measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    return "\n".join(lines)
