"""`torch.compile` for the parts of a block that are dense: norms, attention, and a feed-forward without experts.

Routers and experts stay as they are: their shapes change with every step. (During a warm-up of the depth capacity those
of attention in routed blocks do, too, and torch compiles again.) Parameters, names and checkpoints
do not know of it; results change by rounding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mode.config.file import RunConfig
from mode.config.section import ConfigError
from mode.transformer.block import BlockBody, DenseFeedForward
from mode.transformer.model import ModeTransformer


@contextmanager
def uncompiled(was_compiled: bool) -> Iterator[None]:
    """For sampling, whose shapes change with every token: compiling for each would take longer than it saves."""
    if not was_compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def compile_dense_parts(model: ModeTransformer, run: RunConfig, device: torch.device) -> None:
    """Takes effect at the first forward pass of each part, which then takes seconds."""
    if run.engine.zero_stage == 3:
        raise ConfigError(
            "mode.train.compile",
            "is true with zero_optimization.stage 3, whose gathering of weights cannot be compiled; "
            "use stage 2, or set it to false",
        )
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            "mode.train.compile",
            f"is true, which on a CPU needs a C++ compiler, and there is no {compiler}; "
            "install one, name it by CXX in one word (torch takes no more), or set it to false",
        )
    for body in (module for module in model.modules() if isinstance(module, BlockBody)):
        for part in (body.attention_norm, body.attention, body.feed_forward_norm, body.feed_forward):
            if part is not body.feed_forward or isinstance(part, DenseFeedForward):
                part.compile()
