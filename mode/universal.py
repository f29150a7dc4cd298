"""DeepSpeed's universal checkpoints: readable by every ZeRO stage, and loaded with all that a model's layers hold.

DeepSpeed alone restores neither buffers, such as a selection bias, nor at stage 3 the optimizer's step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from mode.config.section import ConfigError

# Where stages 1 and 2 and where stage 3 look for the model's state.
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
OF_THE_LAYOUT = ("params", "name", "moe", "param_group_type")  # entries of an optimizer group that must not move along


def load_universal(engine: Any, folder: str | Path) -> dict[str, Any]:
    """Restores the engine from a universal checkpoint, made by DeepSpeed's `ds_to_universal`; returns the client state.

    The layout may be another than the one that saved: number of ranks, `ep_size`, ZeRO stage 1 to 3. The engine comes
    from `mode.initialize` with `"checkpoint": {"load_universal": true}` in its configuration. Selection biases,
    warm-ups and all other buffers are restored, too. The first load adds to the folder what other ZeRO stages look for
    there. A collective.
    """
    folder = Path(folder)
    if not engine.load_universal_checkpoint():
        raise ConfigError(
            "checkpoint.load_universal",
            'is false; build the engine with "checkpoint": {"load_universal": true} in its configuration',
        )
    if engine.zero_optimization_stage() == 0:
        raise ConfigError("zero_optimization.stage", "is 0, which loads no universal checkpoint; use 1, 2 or 3")
    problems: list[str | None] = [None]
    if distributed.get_rank() == 0:
        problems = [_problem(folder)]
    distributed.broadcast_object_list(problems)
    if problems[0] is not None:
        raise ConfigError("folder", f"{problems[0]}; name what ds_to_universal wrote", str(folder))
    path, state = type(engine).load_checkpoint(engine, str(folder.parent), tag=folder.name)
    if path is None:
        raise ConfigError("folder", "holds no universal checkpoint that DeepSpeed can load", str(folder))
    separate_optimizer_steps(engine)
    _restore_buffers(engine.module, folder)
    return dict(state)


def _problem(folder: Path) -> str | None:
    """Completes the checkpoint; returns what is wrong with it, for all ranks to raise."""
    if not (folder / "zero").is_dir():
        return "is not a universal checkpoint"
    try:
        complete(folder)
    except Exception as error:
        return f"cannot be made readable for every ZeRO stage: {type(error).__name__}: {error}"
    return None


def separate_optimizer_steps(engine: Any) -> None:
    """DeepSpeed gives all parts of a stage-3 optimizer one and the same step tensor, which each would then count up."""
    for values in engine.optimizer.optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"] = values["step"].clone()


def _restore_buffers(model: nn.Module, folder: Path) -> None:
    saved = _load(folder / MODEL_STATES[0], mmap=True)["module"]
    buffers = {name: saved[name] for name, _ in model.named_buffers() if name in saved}
    model.load_state_dict(buffers, strict=False)


def complete(folder: Path) -> None:
    """Makes a universal checkpoint of one ZeRO stage readable by the others.

    Stages 1 and 2 and stage 3 look for the model's state under different names and for the optimizer's step and
    hyperparameters in different places, and store tensors bare or in a dictionary; DeepSpeed writes only what the
    stage it converts needs. Interrupted, it can begin again.
    """
    present = [folder / name for name in MODEL_STATES if (folder / name).exists()]
    if len(present) == len(MODEL_STATES):
        return  # the second is written last
    path = folder / "zero" / "optimizer_state.pt"
    state = _load(path)
    groups = [
        {name: value for name, value in group.items() if name not in OF_THE_LAYOUT} for group in state["param_groups"]
    ]
    step = _step(folder, state)
    state.setdefault("ds_version", _load(present[0], mmap=True)["ds_version"])
    state["param_groups"] = groups
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    _replace(path, state)
    for path in (folder / "zero").glob("*/*.pt"):
        values = _load(path)
        if isinstance(values, torch.Tensor) and path.stem != "step":
            _replace(path, {"param": values})
    for path in (folder / "zero").glob("*/exp_avg.pt"):
        _replace(path.with_name("step.pt"), step)
    for name in MODEL_STATES:
        if not (folder / name).exists():
            shutil.copyfile(present[0], folder / f"{name}.tmp")
            (folder / f"{name}.tmp").replace(folder / name)


def _step(folder: Path, state: dict[str, Any]) -> Any:
    """How often the optimizer has stepped, from wherever it was saved."""
    saved = next((folder / "zero").glob("*/step.pt"), None)
    return state["optimizer_state_dict"]["state"][0]["step"] if saved is None else _load(saved)


def _load(path: Path, mmap: bool = False) -> Any:
    """As DeepSpeed loads it: a client state may hold anything. In the trainer, nothing but tensors and plain values."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=mmap)


def _replace(path: Path, value: Any) -> None:
    """Writes a file at once: it is the old one or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save(value, temporary)
    temporary.replace(path)
