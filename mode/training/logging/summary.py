"""How a finished run ends: a table of its figures, a sample, and the commands to go on with."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import torch

from mode.config.file import RunConfig
from mode.data import PackedData, bigram_loss, spread_rows
from mode.training.logging.console import table
from mode.training.loop.compiling import uncompiled
from mode.transformer.generation.page import printable
from mode.transformer.model import ModeTransformer

SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS = 24, 72


def closing_table(
    model: ModeTransformer,
    data: PackedData,
    metrics: Path,
    position: Mapping[str, int],
    losses: Mapping[str, float],
    seconds: float,
) -> str:
    config, validation, loss = model.config, data.validation, losses["loss/val"]
    rows = spread_rows(validation.rows, config.train.eval_sequences)
    bigram = bigram_loss(data.train.rows[:].reshape(-1), rows, config.model.vocab_size)
    train = _last_value(metrics, "loss/train")
    causal = []
    if config.depth is not None:
        method = model.causal_method(True)
        causal = [("causal loss", f"{losses['loss/val_causal']:.4f}  (routed by the {method}, as in sampling)")]
    return table(
        [
            ("train loss", f"{train:.4f}" if train is not None else "not logged"),
            ("validation loss", f"{loss:.4f}  (a bigram model: {bigram:.4f})"),
            *causal,
            ("perplexity", f"{math.exp(min(loss, 700)):.2f}"),
            ("bits per byte", f"{loss / math.log(2) / validation.bytes_per_token:.4f}"),
            ("tokens", f"{position['tokens']:,}"),
            ("training FLOPs", f"{position['flops']:.4e}"),
            ("time", f"{seconds:.0f} s"),
        ]
    )


def _last_value(metrics: Path, tag: str) -> float | None:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return next((row[tag] for row in map(json.loads, reversed(lines)) if tag in row), None)


def sample(model: ModeTransformer, run: RunConfig, data: PackedData, device: torch.device) -> str:
    """Text without control characters, the same on every rank.

    Where blocks are collectives, without a cache: then every rank enters every block.
    """
    config = run.mode
    length = config.model.sequence_length
    num_prompt = min(SAMPLE_PROMPT_TOKENS, length // 2)
    prompt = torch.from_numpy(data.validation.rows[:1][:, :num_prompt].astype("int64")).to(device)
    ep_size = config.experts.ep_size if config.experts is not None else 1
    with uncompiled(config.train.compile):
        ids = model.generate(
            prompt,
            min(SAMPLE_NEW_TOKENS, length - num_prompt),
            temperature=0.8,
            use_cache=ep_size == 1 and run.engine.zero_stage < 3,
            seed=config.seed,
        )
    return printable(data.tokenizer.decode(ids[0].tolist()))


def commands(run_dir: Path, world_size: int) -> str:
    """The commands to go on with, as they are typed; of several nodes, on each of them."""
    folder = quote(str(run_dir))
    local_ranks = int(os.environ.get("LOCAL_SIZE", world_size))
    nodes = world_size // local_ranks
    again = f"  (on {nodes} nodes, with the launcher's other options as before)" if nodes > 1 else ""
    return (
        f"compare runs: tensorboard --logdir {quote(str(run_dir.parent))}\n"
        f"resume:       deepspeed --num_gpus {local_ranks} train.py --deepspeed_config "
        f"{quote(str(run_dir / 'config.json'))} --output_dir {folder} --resume auto{again}"
    )
