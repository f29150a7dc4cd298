"""`torch.compile` for the parts of a block that are dense: norms, attention, and a feed-forward without experts.

Routers and experts stay as they are: their shapes change with every step. Parameters, names and checkpoints do not
know of it; results change by rounding.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mode.config_file import RunConfig
from mode.data import default_cache_dir
from mode.model.block import BlockBody, DenseFeedForward
from mode.model.transformer import ModeTransformer
from mode.section import ConfigError


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
    if device.type == "cpu":
        _name_the_compiler(run)
    for body in (module for module in model.modules() if isinstance(module, BlockBody)):
        for part in (body.attention_norm, body.attention, body.feed_forward_norm, body.feed_forward):
            if part is not body.feed_forward or isinstance(part, DenseFeedForward):
                part.compile()


def _name_the_compiler(run: RunConfig) -> None:
    """Refuses CXX if it does not work. torch takes it for one word, so a command of several becomes a script."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    try:
        subprocess.run([*command, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(
            "mode.train.compile",
            f"is true, which on a CPU needs a C++ compiler, and there is no working {shlex.join(command)}; "
            "install one, name it by CXX, or set it to false",
        ) from None
    if len(command) > 1:
        from torch._inductor import config

        cache_dir = run.mode.data.cache_dir
        folder = Path(cache_dir).expanduser().absolute() if cache_dir is not None else default_cache_dir()
        config.cpp.cxx = (None, str(_script(command, folder)))


def _script(command: list[str], folder: Path) -> Path:
    """Its name tells gcc from clang, which torch looks at, and is the same in every run, as torch caches by it."""
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    words = "-".join(re.sub(r"[^\w+.-]", "", Path(word).name) for word in command)[:60]
    script = folder / f"cxx-{zlib.crc32(text.encode()):08x}-{words}"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = script.with_name(f"{script.name}.{os.getpid()}")
        scratch.write_text(text)
        scratch.chmod(0o755)
        scratch.rename(script)
    return script
