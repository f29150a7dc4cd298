"""A training step of MoE and MoDE models of one size: do skipped FLOPs become saved time?

Forward, backward and optimizer on the real engine, one process. FLOPs are those of the routes that were
taken. And a depth-routed block beside a full one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.turns import Contender, gemm_peak, ratio, show_peak, show_ratio, take_turns, why
from mode import accounting
from mode.config.settings import ModeConfig
from mode.moe.layer import LocalMoE
from mode.training.logging.metrics import counted_flops
from mode.training.loop.compiling import compile_dense_parts
from mode.training.loop.engine import build_engine, build_model, device, start_process_group
from mode.training.loop.step import Step, optimizer_step
from mode.transformer.attention import Grid, rope_tables
from mode.transformer.block import Block, DepthRoutedBlock

COMPILED = ", compiled"
CAPACITIES = (0.125, 0.25, 0.5, 0.75)  # of the depth-routed blocks that are measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="the same with mode.train.compile beside it")


class Model:
    """One model and what its last step did."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.run_config = models.run_config(name.removesuffix(COMPILED), options)
        model = build_model(self.run_config.mode)
        if name.endswith(COMPILED):
            compile_dense_parts(model, self.run_config, device())
        self.engine = build_engine(self.run_config, model, 1)
        self.batches = models.batches(self.run_config)
        self.flops: list[int] = []

    def step(self) -> None:
        batch = next(self.batches)
        step: Step = optimizer_step(self.engine, self.run_config, [batch], device(), lambda losses, inputs: None)
        self.flops.append(counted_flops(self.run_config.mode, len(batch.input_ids), step.sums.tolist()))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    start_process_group()
    names = [*models.VARIANTS, *(name + COMPILED for name in models.VARIANTS if options.compile)]
    found = {name: Model(name, options) for name in names}
    seconds = take_turns([Contender(name, model.step) for name, model in found.items()], options.repeats)
    flops = {name: statistics.median(model.flops[1:]) for name, model in found.items()}
    rows = []
    for name in found:
        baseline = "moe" + COMPILED if name.endswith(COMPILED) else "moe"
        faster = ratio(seconds[baseline], seconds[name])
        fewer = flops["moe"] / flops[name]
        rows.append(
            {
                "model": name,
                "seconds": statistics.median(seconds[name]),
                "flops": flops[name],
                "state_bytes": state_bytes(found[name].run_config.mode),
                "times_faster": faster,
                "times_fewer_flops": fewer,
                "of_uncompiled": ratio(seconds[name], seconds[name.removesuffix(COMPILED)]),
                "kept_of_the_saving": {key: value / fewer for key, value in faster.items()},
            }
        )
    blocks, absent = measure_blocks(options)
    figures = {"step": rows, "blocks": blocks, "absent": absent, "options": settings(options)}
    return {**figures, "gemm_peak": gemm_peak()}


def state_bytes(config: ModeConfig) -> int:
    """Weights, gradients and Adam's two moments in fp32, which every step reads or writes whatever its tokens do."""
    return 4 * 4 * accounting.num_parameters(config)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("command", "json", "write")}


# ---- one block ----


class PublicBlock(nn.Module):
    """The body of our block as the package `mixture-of-depth` wants a block."""

    def __init__(self, block: Block, grid: Grid, width: int) -> None:
        super().__init__()
        self.block, self.grid, self.hidden_size = block, grid, width

    def forward(self, x_1SD: Tensor, position_ids: Tensor, **rest: Any) -> tuple[Tensor]:
        update_1SD = self.block.body(x_1SD, self.grid.take(position_ids, None))
        return (x_1SD + update_1SD,)


def measure_blocks(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Forward and backward of a full and of a depth-routed block; others that keep as many tokens, if installed."""
    config: ModeConfig = models.run_config("mode_staged", options).mode
    rows, length = options.tokens // options.sequence_length, options.sequence_length
    positions_1L = torch.arange(length).unsqueeze(0)
    cos_1LH, sin_1LH = rope_tables(positions_1L, config.model.head_width, config.model.rope_theta, torch.float32)
    one_row = Grid.of_sequence(positions_1L, cos_1LH, sin_1LH, None)
    whole = Grid.of_sequence(
        positions_1L.expand(rows, -1), cos_1LH.expand(rows, -1, -1), sin_1LH.expand(rows, -1, -1), None
    )
    x_BLD = torch.randn(rows, length, config.model.width, requires_grad=True)
    keys_B = torch.arange(rows)
    full = Block(config, 0, LocalMoE)
    blocks: dict[str, nn.Module] = {"full block": full}
    for capacity in CAPACITIES:
        assert config.depth is not None
        depth = dataclasses.replace(config.depth, capacity_fraction=capacity)
        routed = DepthRoutedBlock(dataclasses.replace(config, depth=depth), 1, LocalMoE)
        blocks[f"depth-routed, {capacity:.1%}"] = routed
    contenders = []
    for name, block in blocks.items():
        scale_weights(block)
        contenders.append(block_contender(name, block, x_BLD, partial(block, x_BLD, whole, keys_B)))
    absent = {}
    try:
        from MoD import MoD

        public = MoD(0.125, PublicBlock(full, one_row, config.model.width))
        public.router.eval()  # in training it starts at full capacity
        arguments = dict.fromkeys(("attention_mask", "past_key_value"))
        call = partial(
            public, x_BLD, position_ids=whole.positions_BS, output_attentions=False, use_cache=False, **arguments
        )
        contender = block_contender("mixture-of-depth, 12.5%", public, x_BLD, call)
        contender.run()
        contenders.append(contender)
    except Exception as error:  # not installed, or it fails: either is reported
        absent["mixture-of-depth"] = why(error)
    seconds = take_turns(contenders, options.repeats, failed=absent)
    return [
        {
            "block": name,
            "seconds": statistics.median(found),
            "of_the_full_block": ratio(found, seconds["full block"]),
        }
        for name, found in seconds.items()
    ], absent


@torch.no_grad()
def scale_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def block_contender(name: str, block: nn.Module, x_BLD: Tensor, call: partial[Any]) -> Contender:
    direction_BLD = torch.randn_like(x_BLD)

    def run() -> None:
        out = call()
        (out[0] if isinstance(out, tuple) else out).backward(direction_BLD)

    def reset() -> None:
        block.zero_grad(set_to_none=True)
        x_BLD.grad = None

    return Contender(name, run, reset)


def table(figures: dict[str, Any]) -> str:
    options = figures["options"]
    lines = [
        f"A training step of {options['layers']} layers, width {options['width']}, {options['experts']} experts, "
        f"{options['tokens']} tokens, fp32; median of {options['repeats']} turns. {show_peak(figures['gemm_peak'])}",
        "",
        "| model | s | TFLOP counted | of the peak | MB of states | times faster than moe | times fewer FLOPs "
        "| saving kept | of uncompiled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["step"]:
        lines.append(
            f"| {row['model']} | {row['seconds']:.2f} | {row['flops'] / 1e12:.3f} "
            f"| {row['flops'] / row['seconds'] / figures['gemm_peak']:.0%} | {row['state_bytes'] / 1e6:.0f} "
            f"| {show_ratio(row['times_faster'])} "
            f"| {row['times_fewer_flops']:.2f} | {show_ratio(row['kept_of_the_saving'])} "
            f"| {show_ratio(row['of_uncompiled'])} |"
        )
    lines += ["", "| block | ms | of the full block |", "|---|---|---|"]
    for row in figures["blocks"]:
        lines.append(f"| {row['block']} | {row['seconds'] * 1e3:.1f} | {show_ratio(row['of_the_full_block'])} |")
    lines += [""] + [f"Not measured: {name} ({reason})." for name, reason in figures["absent"].items()]
    return "\n".join(lines).rstrip()
