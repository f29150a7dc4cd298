"""Measures this package beside what its users run today, side by side in one run.

    python tools/benchmark.py dispatch              expert parallelism: bytes sent and time, 2 and 4 ranks

The contenders take turns, many times over, so that a busy machine slows all of them alike. A time is the
median of the repeats; a ratio is the median of the ratios within a turn, with the middle half of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks share this machine's cores

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, distributed, nn

from mode import accounting
from mode.accounting import BlockCounts
from mode.config import ModeConfig
from mode.layers import SwiGLU
from mode.moe.parallel import ParallelMoELayer
from mode.moe.router import BiasedExpertRouter
from mode.training.engine import start_process_group
from mode.training.local_ranks import run_on_ranks

CAPACITY = 1.25  # of the native layer: the usual choice


@dataclass(frozen=True)
class Contender:
    """Something that takes a turn. `run` does all of its work once."""

    name: str
    run: Callable[[], None]


def take_turns(contenders: list[Contender], repeats: int, before: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of every run; one round of all of them is left out, to warm up. `before` comes ahead of each."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(repeats + 1):
        for contender in contenders:
            before()
            started = time.perf_counter()
            contender.run()
            before()
            if turn:
                seconds[contender.name].append(time.perf_counter() - started)
    return seconds


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """How many times `over` is `under`: the median over the turns, and the middle half."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high}


# ---- dispatch: expert parallelism ----


def dispatch_on_a_rank(options: dict[str, Any]) -> dict[str, Any]:
    """Bytes and times of one expert layer, forward and backward, ours and DeepSpeed's own, for every no-op share."""
    start_process_group()
    torch.set_num_threads(1)
    num_tokens, width, hidden, num_experts, top_k = (
        options[name] for name in ("tokens", "width", "hidden", "experts", "top_k")
    )
    ep_size = distributed.get_world_size()
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x_TD = torch.randn(num_tokens, width, generator=generator).requires_grad_()
    native = native_layer(width, hidden, num_experts, top_k, CAPACITY)
    found = []
    for share in options["shares"]:
        layer, config = our_layer(width, hidden, num_experts, top_k, share, x_TD)
        reduced = native_layer(width, hidden, num_experts, top_k, CAPACITY * (1 - share))
        contenders = [
            Contender("mode", partial(train_once, layer, x_TD)),
            Contender("deepspeed", partial(train_once, native, x_TD)),
            Contender("deepspeed, reduced capacity", partial(train_once, reduced, x_TD)),
        ]
        routing = layer(x_TD)[1]
        processed, no_op = int(routing.num_processed()), int(routing.num_no_op())
        counts = BlockCounts(1, num_tokens, num_tokens, num_tokens, processed, no_op, 0)
        seconds = take_turns(contenders, options["repeats"], distributed.barrier)
        found.append(
            {
                "share": share,
                "no_op": no_op,
                "processed": processed,
                "accounting": accounting.all_to_all_bytes(config, counts, element_size=4),
                "bytes": {contender.name: bytes_sent(contender.run) for contender in contenders},
                "seconds": seconds,
            }
        )
    return {"ranks": ep_size, "shares": found}


def our_layer(
    width: int, hidden: int, num_experts: int, top_k: int, share: float, x_TD: Tensor
) -> tuple[ParallelMoELayer, ModeConfig]:
    """Our layer with a bias on the no-ops under which `share` of this rank's choices are no-ops."""
    experts: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "width": hidden,
        "ep_size": distributed.get_world_size(),
        "backend": "grouped_mm",
    }
    if share:
        experts |= {"num_no_ops": num_experts, "no_op_fraction": share, "balance_bias": {}}
    model = {"width": width, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 8, "num_layers": 1, "sequence_length": 8}
    model["ffn_width"] = hidden
    config = ModeConfig.from_dict({"model": model, "experts": experts})
    assert config.experts is not None
    layer = ParallelMoELayer(config.experts, width, ep_rank=distributed.get_rank())
    layer.set_deepspeed_parallelism()
    give_weights(layer)
    if isinstance(layer.router, BiasedExpertRouter):
        hold_share(layer.router, share, x_TD.detach())
    return layer, config


def hold_share(router: BiasedExpertRouter, share: float, x_TD: Tensor) -> None:
    """Searches the bias of the no-ops that gives them `share` of the choices."""
    low, high = -50.0, 50.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        router.bias_J[router.config.num_experts :] = middle
        no_op = router(x_TD).num_no_op().item() / (len(x_TD) * router.config.top_k)
        low, high = (middle, high) if no_op < share else (low, middle)


def native_layer(width: int, hidden: int, num_experts: int, top_k: int, capacity_factor: float) -> MoE:
    """DeepSpeed's own layer with experts of the same shape."""
    with redirect_stdout(StringIO()):
        layer = MoE(
            width,
            SwiGLU(width, hidden),
            num_experts,
            ep_size=distributed.get_world_size(),
            k=top_k,
            capacity_factor=capacity_factor,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    give_weights(layer)
    return layer


@torch.no_grad()
def give_weights(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def train_once(layer: nn.Module, x_TD: Tensor) -> None:
    """Forward and backward; gradients of inputs and weights."""
    layer(x_TD)[0].square().mean().backward()


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


def dispatch(options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in ("tokens", "width", "hidden", "experts", "top_k", "repeats")}
    settings["shares"] = options.shares
    rows = []
    for num_ranks in options.ranks:
        print(f"{num_ranks} ranks ...", file=sys.stderr)
        by_rank = run_on_ranks(dispatch_on_a_rank, num_ranks, settings)
        for ranks in zip(*(found["shares"] for found in by_rank), strict=True):
            # The first all-to-all carries what the rank sends, the second what it answers: one adds up to the other.
            ours, native, reduced = (sum(sum(rank["bytes"][name]) for rank in ranks) for name in ranks[0]["bytes"])
            seconds = ranks[0]["seconds"]
            rows.append(
                {
                    "ranks": num_ranks,
                    "no_op_share": sum(rank["no_op"] for rank in ranks)
                    / sum(rank["no_op"] + rank["processed"] for rank in ranks),
                    "bytes": ours,
                    "accounting": 4 * sum(rank["accounting"] for rank in ranks),
                    "native_bytes": native,
                    "native_reduced_bytes": reduced,
                    "seconds": statistics.median(seconds["mode"]),
                    "native_seconds": statistics.median(seconds["deepspeed"]),
                    "native_reduced_seconds": statistics.median(seconds["deepspeed, reduced capacity"]),
                    "times_native": ratio(seconds["deepspeed"], seconds["mode"]),
                    "times_native_reduced": ratio(seconds["deepspeed, reduced capacity"], seconds["mode"]),
                }
            )
    return {"dispatch": rows, "settings": settings}


def dispatch_table(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    lines = [
        f"One expert layer, forward and backward, fp32: {settings['tokens']} tokens a rank, width {settings['width']}, "
        f"{settings['experts']} experts of width {settings['hidden']}, top-{settings['top_k']}; four all-to-alls, all "
        f"ranks together. DeepSpeed's own layer at capacity {CAPACITY} and, reduced, at {CAPACITY} x (1 - share), "
        "where it drops what does not fit.",
        "",
        "| ranks | no-op share | MB sent | accounting | DeepSpeed | reduced | ms | DeepSpeed | reduced | faster |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["dispatch"]:
        sent = [row[name] / 1e6 for name in ("bytes", "accounting", "native_bytes", "native_reduced_bytes")]
        times = [row[name] * 1e3 for name in ("seconds", "native_seconds", "native_reduced_seconds")]
        faster = row["times_native"]
        lines.append(
            f"| {row['ranks']} | {row['no_op_share']:.3f} | "
            + " | ".join(f"{value:.3f}" for value in sent)
            + " | "
            + " | ".join(f"{value:.1f}" for value in times)
            + f" | {faster['median']:.2f}x ({faster['low']:.2f}-{faster['high']:.2f}) |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("dispatch", help="expert parallelism beside deepspeed.moe.layer.MoE")
    command.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    command.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75], metavar="SHARE")
    for name, default in (("tokens", 2048), ("width", 256), ("hidden", 512), ("experts", 8), ("top_k", 1)):
        command.add_argument(f"--{name}", type=int, default=default)
    command.add_argument("--repeats", type=int, default=20)
    command.add_argument("--json", action="store_true")
    command.add_argument("--write", metavar="FILE", help="write the table there as Markdown")
    options = parser.parse_args(arguments)
    figures = dispatch(options)
    text = dispatch_table(figures)
    print(json.dumps(figures, indent=1) if options.json else text)
    if options.write:
        Path(options.write).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
