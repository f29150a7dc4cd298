"""A trained model and its tokenizer, from a run directory or an exported folder, in one process.

A checkpoint is read without running code that may be in it (`unpickling`); an exported folder holds no pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mode.config.section import ConfigError
from mode.data import PackedData, prepare_data
from mode.data.tokenizer import Tokenizer
from mode.training.checkpoints.checkpoint import MANIFEST, STEP, damage, newest_whole, step_of
from mode.training.checkpoints.consolidate import config_of, full_weights
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import WEIGHTS


@dataclass(frozen=True)
class Loaded:
    model: ModeTransformer  # for evaluation
    tokenizer: Tokenizer
    source: Path  # the checkpoint or folder it came from

    @property
    def name(self) -> str:
        """The folder's name, or that of the run and the step."""
        source = self.source.resolve()
        return f"{source.parents[1].name}, step {step_of(source)}" if STEP.fullmatch(source.name) else source.name


def load_model(path: Path, step: int | None = None, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Loaded:
    """From an exported folder, a run directory (its newest whole checkpoint, or that of `step`) or a folder step_N."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("--device", f'is "{device}", which torch refuses: {reason}; try cpu') from None
    if (path / WEIGHTS).is_file():
        if step is not None:
            raise ConfigError("--step", f"is {step}, but {path} is an exported model, which has no steps; leave it out")
        return Loaded(ModeTransformer.from_pretrained(path, device=device, dtype=dtype), Tokenizer.load(path), path)
    checkpoint = choose_checkpoint(path.absolute(), step)
    model = ModeTransformer.from_weights(config_of(checkpoint), full_weights(checkpoint)).to(device)
    tokenizer = Tokenizer.load(checkpoint.parent.parent / "tokenizer")
    return Loaded(model if dtype is None else model.to(dtype), tokenizer, checkpoint)


def load_with_text(path: Path, step: int | None, *, device: str) -> tuple[Loaded, PackedData]:
    """A model and the text of its configuration, prepared again if need be, as the model saw it."""
    loaded = load_model(path, step, device=device)
    data = prepare_data(loaded.model.config)
    if not data.tokenizer.same_as(loaded.tokenizer):
        raise ConfigError(
            "mode.data",
            f"the text at {data.source} gives another tokenizer than the model was trained with: it has changed since; "
            "do this where the original text is",
        )
    return loaded, data


def choose_checkpoint(path: Path, step: int | None) -> Path:
    """The checkpoint that a command line means, its files compared with its manifest."""
    if STEP.fullmatch(path.name):
        if step is not None and step != step_of(path):
            raise ConfigError("--step", f"is {step}, but {path} is of step {step_of(path)}; leave it out")
        checkpoint = path
    else:
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if step is None:
            newest = newest_whole(folder)
            if newest is None:
                lack = "holds no whole checkpoint" if path.is_dir() else "does not exist"
                raise ConfigError("checkpoint", f"{path} {lack}; name a run directory, or a folder named step_N")
            return newest
        checkpoint = folder / f"step_{step:08d}"
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError("checkpoint", f"{checkpoint} is not a complete checkpoint; name another")
    problem = damage(checkpoint)
    if problem is not None:
        raise ConfigError("checkpoint", f"{checkpoint} is damaged: {problem}; name another")
    return checkpoint
