"""Small configurations and comparisons that many tests share."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mode.config.settings import ModeConfig
from mode.transformer.attention import Grid, rope_tables

MODEL: dict[str, Any] = {
    "vocab_size": 40,
    "num_layers": 2,
    "width": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_width": 24,
    "sequence_length": 16,
}
HAS_COMPILER = shutil.which((shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]) is not None
needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason="the kernels of CPUs need a C++ compiler")

EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "width": 24, "backend": "loop"}
NO_OPS: dict[str, Any] = {"num_no_ops": 1, "no_op_fraction": 0.25}
DEPTH: dict[str, Any] = {"capacity_fraction": 0.25, "every": 2}


def make_config(
    model: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
    depth: dict[str, Any] | None = None,
    **rest: Any,
) -> ModeConfig:
    """A tiny model. `experts` and `depth` add that kind of routing, with what they say changed."""
    return ModeConfig.from_dict(
        {
            "model": MODEL | (model or {}),
            "experts": None if experts is None else EXPERTS | experts,
            "depth": None if depth is None else DEPTH | depth,
            **rest,
        }
    )


def place(config: ModeConfig, num_rows: int, length: int, documents: Tensor | None = None, dtype=torch.float64):
    positions = torch.arange(length).expand(num_rows, -1)
    cos, sin = rope_tables(positions, config.model.head_width, config.model.rope_theta, dtype)
    return Grid.of_sequence(positions, cos, sin, documents)


def spread_weights(module: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Random weights large enough that every term of every gradient shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """d(sum of output x fixed random numbers) / d(each input); zeros where the output does not depend on it."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    found = torch.autograd.grad((output * direction).sum(), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: dict[str, Tensor], tolerance: float) -> None:
    """Outputs and the gradients of every input agree within `tolerance` of their size."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    tensors = list(inputs.values())
    pairs = zip(inputs, gradients(actual, tensors), gradients(expected, tensors), strict=True)
    for name, actual_gradient, expected_gradient in pairs:
        torch.testing.assert_close(
            actual_gradient, expected_gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
