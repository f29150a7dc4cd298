"""Reads checkpoints without running code that may be in them.

DeepSpeed's files are pickles, and an ordinary unpickler calls whatever a file names. Here only tensors, plain
values and the few classes that DeepSpeed saves are made; a file that names anything else is refused.

Knows nothing of what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mode.config.section import ConfigError

FORCE, FORBID = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch reads them at every load
NAMED = re.compile(r"GLOBAL ([\w.]+)")


def _deepspeed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextlib.contextmanager
def weights_only(checkpoint: Path) -> Iterator[None]:
    """Makes every `torch.load` as strict as with `weights_only=True`, also where DeepSpeed asks for the contrary.

    Processes forked meanwhile are as strict; those started otherwise lack the allowed classes. Must not be nested.
    """
    before = {name: os.environ.pop(name, None) for name in (FORCE, FORBID)}
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_deepspeed_classes()):
            yield
    except pickle.UnpicklingError as error:
        named = NAMED.search(str(error))
        what = "holds more than tensors and plain values" if named is None else f"names {named[1]}"
        raise ConfigError(
            "checkpoint",
            f"a file {what}, which no checkpoint of mode does: it could run code and was not loaded; name another",
            str(checkpoint),
        ) from error
    finally:
        del os.environ[FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load_file(file: Path, *, mmap: bool = False) -> Any:
    """One file of a checkpoint, on the CPU."""
    with weights_only(file.parent):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except (RuntimeError, EOFError, KeyError) as error:
            problem = "cannot be read as an archive that torch.save wrote; name another checkpoint"
            raise ConfigError("checkpoint", problem, str(file)) from error
