"""The exported folder: `model.safetensors`, `config.json` and the tokenizer's files.

Written under another name and renamed at the end, so it is complete or absent. Reading one never unpickles
anything, and every tensor is checked against what the configuration says before it is used.

Knows names, shapes and files; nothing of modules, checkpoints or DeepSpeed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import mode
from mode.config.file import read_json
from mode.config.section import ConfigError, show
from mode.config.settings import ModeConfig

FORMAT_VERSION = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
FILES = (WEIGHTS, CONFIG, *TOKENIZER_FILES)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED_DTYPES = ("F64", "F32", "BF16", "F16")  # by safetensors' names; others it knows cannot be computed with

# Settings that change how a model is trained or computed, not what its weights mean.
FREE = {
    "model.activation_checkpointing",
    "experts.no_op_fraction",
    "experts.capacity_factor",
    "experts.balance_loss",
    "experts.balance_bias.rate",
    "experts.z_loss_weight",
    "experts.backend",
    "experts.ep_size",
    "depth.warmup_fraction",
    "depth.predictor.weight",
    "depth.aux_loss.weight",
    "depth.balance_weight",
    "depth.causal",
}


# ---------------------------------------------------------------------------------------------------
# Writing


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuses to write where something else is, before any long work."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("output", f"{folder} is a file; name a folder that does not exist yet")
    present = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in present if name not in FILES]
    if foreign:
        raise ConfigError("output", f"{folder} holds {foreign[0]}, which no export wrote; name another folder")
    if present and not overwrite:
        raise ConfigError("output", f"{folder} is not empty; name another folder, or give --overwrite")


def save_pretrained(
    folder: Path,
    config: ModeConfig,
    weights: Mapping[str, Tensor],
    tokenizer_folder: Path,
    *,
    overwrite: bool = False,
) -> None:
    """Writes `weights`, as they are, with what is needed to use them. A tied head must be left out."""
    check_output(folder, overwrite)
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in weights.items()},
            incomplete / WEIGHTS,
            metadata={"format": "pt"},
        )
        about = {"format_version": FORMAT_VERSION, "mode_version": mode.__version__, "mode": config.to_dict()}
        (incomplete / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (incomplete / WEIGHTS).chmod((incomplete / CONFIG).stat().st_mode)  # safetensors allows its owner only
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_folder / name, incomplete / name)
        if folder.exists():
            shutil.rmtree(folder)
        incomplete.rename(folder)
    except SafetensorError as error:  # the library's name for a full disk, too
        raise OSError(f"{incomplete / WEIGHTS}: {error}") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------
# Reading


def read_config(folder: str | Path) -> ModeConfig:
    """The configuration of an exported folder, or `ConfigError`."""
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(
                name, "is missing; name a folder that tools/export.py wrote, or export it again", str(folder)
            )
    file = folder / CONFIG
    try:
        about = read_json(file)
        if not isinstance(about, dict) or "format_version" not in about:
            raise ConfigError("format_version", "is missing: this is not the config.json of an exported model")
        version = about["format_version"]
        if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise ConfigError(
                "format_version",
                f"is {show(version)}, written by mode {about.get('mode_version')}; this is mode {mode.__version__}, "
                f"which reads {FORMAT_VERSION}: install a newer one, or export the model again",
            )
        try:
            return ModeConfig.from_dict(about.get("mode"))  # type: ignore[arg-type]  # it checks what it is given
        except ConfigError as error:
            raise (error if error.path == "mode" else error.under("mode")) from None
    except ConfigError as error:
        raise error.in_file(str(file)) from None


def read_weights(
    folder: str | Path, expected: Mapping[str, Tensor], device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """The tensors of an exported folder, exactly those of `expected`, whose values do not matter.

    They keep the type they are stored in. Missing, unknown and wrongly shaped ones are a `ConfigError`.
    """
    file = Path(folder) / WEIGHTS
    try:
        with safe_open(file, framework="pt", device=str(device)) as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
            _check_shapes(file, shapes, {name: tuple(tensor.shape) for name, tensor in expected.items()})
            for name in expected:
                kind = stored.get_slice(name).get_dtype()
                if kind not in STORED_DTYPES:
                    legal = ", ".join(STORED_DTYPES)
                    raise ConfigError(name, f"holds {kind}; it must be one of {legal}: export again", str(file))
            weights = {name: stored.get_tensor(name) for name in expected}
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("file", f"cannot be read: {reason}; export the model again", str(file)) from None
    return weights


def _check_shapes(file: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    agree = f"the weights and {CONFIG} must come from one export: export the model again"
    for name, shape in expected.items():
        if name not in stored:
            raise ConfigError(name, f"is missing; it must be of shape {list(shape)}; {agree}", str(file))
        if stored[name] != shape:
            problem = f"has shape {list(stored[name])} where the configuration makes it {list(shape)}"
            raise ConfigError(name, f"{problem}; {agree}", str(file))
    for name in sorted(stored.keys() - expected.keys()):
        raise ConfigError(name, f"is unknown to a model of this configuration; {agree}", str(file))


def check_same_model(config: ModeConfig, folder: str | Path) -> None:
    """Refuses a folder whose weights mean something else in a model of `config`, naming the first difference."""
    mine, theirs = config.to_dict(), read_config(folder).to_dict()
    for name in ("model", "experts", "depth"):
        found = _first_difference(mine[name], theirs[name], name)
        if found is not None:
            path, value, stored = found
            raise ConfigError(
                f"mode.{path}",
                f"is {show(value)} but {show(stored)} in {Path(folder) / CONFIG}, which mode.train.init_from names; "
                "make them equal, or set mode.train.init_from to null",
            )


def _first_difference(mine: Any, theirs: Any, path: str) -> tuple[str, Any, Any] | None:
    if path in FREE or mine == theirs:
        return None
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return path, mine, theirs
    found = (_first_difference(mine[name], theirs[name], f"{path}.{name}") for name in mine)
    return next((difference for difference in found if difference is not None), None)
