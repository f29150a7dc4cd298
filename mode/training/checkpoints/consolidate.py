"""A checkpoint of any ZeRO stage, number of ranks and expert parallelism, put together again in one process.

DeepSpeed's own conversion does the work, because only DeepSpeed knows how it divides tensors. Its files
are pickles; they are read so that no code in them runs.

Knows nothing of where the weights go, and needs no process group.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mode.config.section import ConfigError, show
from mode.config.settings import ModeConfig
from mode.training.checkpoints.checkpoint import run_of
from mode.training.checkpoints.unpickling import load_file, weights_only
from mode.transformer.model import ModeTransformer


def config_of(checkpoint: Path) -> ModeConfig:
    """The configuration a checkpoint was trained with."""
    try:
        run = run_of(checkpoint)
        return ModeConfig.from_dict(run.get("config") or run["mode"])
    except (KeyError, TypeError, AttributeError):
        raise ConfigError("run", "does not say what was trained", str(checkpoint / "manifest.json")) from None
    except ConfigError as error:
        raise error.under("run.mode").in_file(str(checkpoint / "manifest.json")) from None


def full_weights(checkpoint: Path, scratch: Path | None = None, workers: int = 1) -> dict[str, Tensor]:
    """Every parameter of the whole model as trained, in float32, and every buffer; a tied head once.

    `scratch` is a folder with room for three times the float32 weights; by default the system's.
    """
    with torch.device("meta"):
        model = ModeTransformer(config_of(checkpoint))
    expected = model.weights()
    parameters = [name for name, _ in model.named_parameters()]  # a shared one once, by its first name
    state = _model_state(checkpoint)
    found = {name: state["module"].get(name) for name in expected if name not in parameters}
    if any(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")):
        with tempfile.TemporaryDirectory(prefix="export_", dir=scratch) as folder:
            to_universal(checkpoint, Path(folder) / "universal", workers)
            for name in tqdm(parameters, desc="reading weights", leave=False, disable=None):
                found[name] = _read_universal(Path(folder) / "universal" / "zero" / name / "fp32.pt")
    else:
        found |= _without_zero(checkpoint, state, {name: expected[name] for name in parameters})
    for name, tensor in expected.items():
        if found[name] is None or found[name].numel() != tensor.numel():
            size = "is missing" if found[name] is None else f"has {found[name].numel()} entries"
            raise ConfigError(
                name,
                f"{size} where the model has {list(tensor.shape)}; the checkpoint is of another model or version: "
                "use the version of mode that wrote it",
                str(checkpoint),
            )
    return {name: found[name].float().reshape(tensor.shape) for name, tensor in expected.items()}


def to_universal(checkpoint: Path, folder: Path, workers: int = 1) -> None:
    """Writes a ZeRO checkpoint as DeepSpeed's universal checkpoint, which any number of ranks can load.

    `folder` is complete or absent. It holds `zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt` of whole tensors.
    """
    for file in checkpoint.glob("*.pt"):
        _refuse_paths(_load(file), file)
    if multiprocessing.get_start_method() != "fork":
        workers = 1  # new interpreters would not know which classes may be loaded
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}_", dir=folder.parent) as temporary:
        made = Path(temporary) / "universal"  # DeepSpeed writes beside it, too
        made.mkdir()
        with _quiet(), weights_only(checkpoint):
            from deepspeed.checkpoint import ds_to_universal

            try:
                ds_to_universal.main(
                    argparse.Namespace(
                        input_folder=str(checkpoint),
                        output_folder=str(made),
                        num_extract_workers=workers,
                        num_merge_workers=workers,
                        keep_temp_folder=False,
                        strict=True,
                        inject_missing_state=True,
                    )
                )
            # Whatever comes first: a missing key, a failed assertion, a full disk (a RuntimeError in torch.save).
            except (KeyError, ValueError, AssertionError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                adam = "; it knows the state of Adam and AdamW only" if reason.strip("'").startswith("exp_avg") else ""
                raise ConfigError(
                    "checkpoint", f"DeepSpeed could not put it together: {reason}{adam}", str(checkpoint)
                ) from error
        made.rename(folder)


def _refuse_paths(value: Any, file: Path) -> None:
    """Refuses a slash in any name: DeepSpeed writes files named after what it finds, so they could land anywhere."""
    if isinstance(value, str) and "/" in value:
        raise ConfigError("checkpoint", f"names {show(value)}, which mode never writes; name another", str(file))
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_paths(key, file)
            if key != "ds_config":  # holds paths of the user's, which the conversion does not use
                _refuse_paths(part, file)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _refuse_paths(part, file)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallows what DeepSpeed prints while it is imported and converts; its progress bars stay on a terminal."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _load(file: Path) -> Any:
    with _quiet():  # its classes may import DeepSpeed
        return load_file(file, mmap=True)


def _model_state(checkpoint: Path) -> dict[str, Any]:
    """What DeepSpeed saved beside the optimizer: at stage 3 empty weights, but whole buffers."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (checkpoint / name).is_file():
            state = _load(checkpoint / name)
            if not isinstance(state, dict) or not isinstance(state.get("module"), dict):
                raise ConfigError("module", "is missing; use a checkpoint that mode wrote", str(checkpoint / name))
            return state
    raise ConfigError("mp_rank_00_model_states.pt", "is missing; this is not a whole checkpoint", str(checkpoint))


def _read_universal(file: Path) -> Tensor | None:
    if not file.is_file():
        return None
    saved = load_file(file)
    tensor: Tensor = saved["param"] if isinstance(saved, dict) else saved
    return tensor


def _without_zero(checkpoint: Path, state: dict[str, Any], expected: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Stage 0: whole tensors in one file and, with expert parallelism, a file per expert."""
    found: dict[str, Tensor | None] = {name: state["module"].get(name) for name in expected}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for file in checkpoint.glob("layer_*_expert_*_model_states.pt"):
        for key, tensor in _load(file).items():
            name, _, number = key.rpartition(".")
            experts[name][int(number)] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[number] for number in sorted(parts)])
    for name, master in _masters(checkpoint, state, list(expected), set(experts)).items():
        weight = found[name]
        if weight is not None and master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight):
            found[name] = master
    return found


def _masters(checkpoint: Path, state: dict[str, Any], names: list[str], experts: set[str]) -> dict[str, Tensor]:
    """The float32 copies of the weights that DeepSpeed's half-precision optimizer without ZeRO keeps, if there are any.

    They are stored without names, in the order of the parameters, those divided among expert-parallel ranks last.
    """
    files = sorted(checkpoint.glob("expp_rank_*_optim_states.pt"), key=lambda file: int(file.name.split("_")[2]))
    optimizers = [_load(file)["optimizer"] for file in files] or [state.get("optimizer") or {}]
    by_rank = [[tensor for group in optimizer.get("fp32_groups", []) for tensor in group] for optimizer in optimizers]
    order = [name for name in names if name not in experts] + [name for name in names if name in experts]
    if any(len(masters) != len(order) for masters in by_rank):
        return {}
    return {
        name: torch.cat(parts) if name in experts else parts[0]
        for name, parts in zip(order, zip(*by_rank, strict=True), strict=True)
    }
