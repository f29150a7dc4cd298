"""Decoding with the cache: tokens per second of MoD and MoDE models beside dense and MoE models of the same size.

The weights are random; the predictors are set such that routed blocks keep the share of tokens they are to keep.
The FLOP ratio beside the time ratio is of the accounting: what the saving could be at best.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks import models
from benchmarks.step import settings
from benchmarks.turns import Contender, gemm_peak, ratio, show_peak, show_ratio, take_turns
from mode import accounting
from mode.config.settings import ModeConfig
from mode.depth.router import LearnedRouter
from mode.tooling import positive_integer
from mode.transformer.generation.cached import CachedDecoder
from mode.transformer.generation.prompts import Prompts
from mode.transformer.model import ModeTransformer

VARIANTS = ("dense", "moe", "mod", "mode_staged", "mode_integrated", "mode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument("--batches", type=positive_integer, nargs="+", default=[1, 16])
    parser.add_argument("--contexts", type=positive_integer, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--steps", type=positive_integer, default=8, help="tokens that are decoded in one turn")


def config_of(variant: str, options: argparse.Namespace, context: int) -> ModeConfig:
    name = {"dense": "moe", "mod": "mode_staged"}.get(variant, variant)
    config = models.run_config(name, options).mode
    length = context + (options.repeats + 1) * options.steps
    model = dataclasses.replace(config.model, sequence_length=length)
    return dataclasses.replace(config, model=model, experts=None if variant in ("dense", "mod") else config.experts)


def flops_per_token(config: ModeConfig, context: int) -> float:
    """Forward FLOPs of one more token: a mean token of a row of that many, as every token is counted to see all."""
    counts = accounting.expected_counts(config, rows=1, length=context)
    return float(accounting.per_token(accounting.model_flops(config, counts).forward, counts))


@torch.no_grad()
def keep_the_share(model: ModeTransformer, ids_BL: torch.Tensor) -> None:
    """Moves each predictor's threshold, block after block, to where it keeps the capacity fraction of these tokens."""
    depth = model.config.depth
    for layer, block in enumerate(model.blocks):
        if depth is not None and model.config.is_routed(layer):
            predicted_BL = model(ids_BL, causal="predictor").routing[layer].depth.predicted_BL
            level = predicted_BL.flatten().quantile(1 - depth.capacity_fraction)
            assert isinstance(block.router, LearnedRouter) and block.router.predictor is not None
            block.router.predictor.down.bias.sub_(level)


class Decoding:
    """One model in the middle of its texts."""

    def __init__(self, config: ModeConfig, ids_BL: torch.Tensor) -> None:
        self.model = ModeTransformer(config).eval()
        keep_the_share(self.model, ids_BL[:4])
        method = "predictor" if config.depth is not None else "router"
        self.decoder = CachedDecoder(self.model, Prompts.from_left_padded(ids_BL, None), method)
        self.ids_B = self.decoder.prefill().argmax(dim=-1)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, number: int) -> None:
        for _ in range(number):
            logits_BV = self.decoder.step(self.ids_B)
            # Random tokens, the same for all models: greedy ones of random weights soon repeat themselves.
            self.ids_B = torch.randint(logits_BV.shape[1], (len(logits_BV),), generator=self.generator)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for context in options.contexts:
        for batch in options.batches:
            generator = torch.Generator().manual_seed(0)
            ids_BL = torch.randint(options.vocabulary, (batch, context), generator=generator)
            configs = {name: config_of(name, options, context) for name in VARIANTS}
            found = {name: Decoding(config, ids_BL) for name, config in configs.items()}
            contenders = [Contender(name, partial(each.steps, options.steps)) for name, each in found.items()]
            seconds = take_turns(contenders, options.repeats)
            for name in VARIANTS:
                flops = flops_per_token(configs[name], context)
                fewer = flops_per_token(configs["moe"], context) / flops
                faster = ratio(seconds["moe"], seconds[name])
                rows.append(
                    {
                        "context": context,
                        "batch": batch,
                        "model": name,
                        "tokens_per_second": batch * options.steps / statistics.median(seconds[name]),
                        "flops_per_token": flops,
                        "times_moe": faster,
                        "times_fewer_flops": fewer,
                        "kept_of_the_saving": faster["median"] / fewer,
                        "cache_bytes": found[name].decoder.num_bytes,
                    }
                )
    return {"decode": rows, "options": settings(options), "gemm_peak": gemm_peak()}


def table(figures: dict[str, Any]) -> str:
    options = figures["options"]
    lines = [
        f"Decoding with the cache, {options['layers']} layers, width {options['width']}, {options['experts']} "
        f"experts of width {options['hidden']}, top-{options['top_k']}, fp32; median of {options['repeats']} turns of "
        f"{options['steps']} tokens. {show_peak(figures['gemm_peak'])}",
        "",
        "| context | batch | model | tokens/s | MFLOP/token | times moe's | times fewer FLOPs | of what FLOPs allow "
        "| cache MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in figures["decode"]:
        lines.append(
            f"| {row['context']} | {row['batch']} | {row['model']} | {row['tokens_per_second']:.0f} | "
            f"{row['flops_per_token'] / 1e6:.2f} | "
            f"{show_ratio(row['times_moe'])} | {row['times_fewer_flops']:.2f} | {row['kept_of_the_saving']:.2f} | "
            f"{row['cache_bytes'] / 1e6:.2f} |"
        )
    return "\n".join(lines)
