"""The models whose training steps are measured: one size, with and without routing, on random tokens."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers import Sizes, native_layer
from mode.config.file import RunConfig, run_config_from_dict
from mode.config.section import ConfigError
from mode.config.settings import ExpertsConfig
from mode.data import Batch
from mode.moe.experts import PREFERENCE
from mode.tooling import positive_integer
from mode.transformer.model import ModeTransformer

DEPTH = {"capacity_fraction": 0.125, "predictor": {"width": 64}}
NO_OPS = {"no_op_fraction": 0.5, "balance_bias": {"rate": 0.02}}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # of experts; of depth
    "moe": ({}, None),
    "mode_staged": ({}, DEPTH),
    "mode_integrated": (NO_OPS, None),
    "mode": (NO_OPS, DEPTH),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    Sizes.add_arguments(parser, tokens=16384)
    for name, default in (("layers", 8), ("sequence_length", 256), ("vocabulary", 1024)):
        parser.add_argument(f"--{name}", type=positive_integer, default=default)
    backends = ["auto", *(name for name in PREFERENCE if name != "megablocks")]  # which knows no fp32
    parser.add_argument("--backend", choices=backends, default="auto", help="what computes the experts")


def run_config(variant: str, options: argparse.Namespace) -> RunConfig:
    experts, depth = VARIANTS[variant]
    no_ops = {"num_no_ops": options.experts} if "no_op_fraction" in experts else {}
    rows, rest = divmod(options.tokens, options.sequence_length)
    if rest:
        raise ConfigError(
            "--tokens", f"is {options.tokens}, not a multiple of --sequence_length {options.sequence_length}"
        )
    return run_config_from_dict(
        {
            "train_batch_size": rows,
            "train_micro_batch_size_per_gpu": rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000000},
            "steps_per_print": 1000000,
            "mode": {
                "model": {
                    "vocab_size": options.vocabulary,
                    "num_layers": options.layers,
                    "width": options.width,
                    "num_heads": 4,
                    "num_kv_heads": 2,
                    "ffn_width": options.hidden,
                    "sequence_length": options.sequence_length,
                },
                "experts": {
                    "num_experts": options.experts,
                    "top_k": options.top_k,
                    "width": options.hidden,
                    "backend": options.backend,
                    **experts,
                    **no_ops,
                },
                "depth": depth,
                "train": {"steps": 1000},
            },
        }
    )


def batches(run: RunConfig) -> Iterator[Batch]:
    """Random tokens without end, the same for every model."""
    generator = torch.Generator().manual_seed(0)
    rows, model = run.engine.batch_layout(1)[0], run.mode.model
    while True:
        ids_BL = torch.randint(model.vocab_size, (rows, model.sequence_length), generator=generator)
        yield Batch(ids_BL, None, torch.arange(rows), torch.ones(rows))


class NativeFeedForward(nn.Module):
    """DeepSpeed's own expert layer where the model has ours. It leaves no record of its routing."""

    def __init__(self, experts: ExpertsConfig, width: int, tokens: int) -> None:
        super().__init__()
        self.layer = native_layer(Sizes(tokens, width, experts.width, experts.num_experts, experts.top_k))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, None]:
        return self.layer(x_TD)[0], None


def native_model(run: RunConfig, tokens: int) -> ModeTransformer:
    """The MoE model with DeepSpeed's own expert layers."""

    def layer(width: int, *, config: ExpertsConfig, **initial: Any) -> Any:
        return NativeFeedForward(config, width, tokens)

    return ModeTransformer(run.mode, layer)
