"""What makes a run the run it is: a checkpoint of another model, corpus or batch is refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mode.config_file import RunConfig
from mode.data import PackedData
from mode.section import ConfigError
from mode.training.checkpoint import run_of


def identity(run: RunConfig, data: PackedData, global_rows: int) -> dict[str, Any]:
    """What must not change between the parts of one run, because it would be another run."""
    mode = run.mode.to_dict()
    mode.pop("train")
    mode.pop("description")
    mode["model"].pop("activation_checkpointing")
    mode["data"].pop("cache_dir")
    if mode["depth"] is not None:
        mode["depth"].pop("causal")
    if mode["experts"] is not None:
        mode["experts"].pop("backend")
        mode["experts"].pop("ep_size")
    corpus = {"train": asdict(data.train.counts), "validation": asdict(data.validation.counts)}
    optimizer = run.deepspeed.get("optimizer", {}).get("type")
    return {"mode": mode, "train_batch_size": global_rows, "corpus": corpus, "optimizer.type": optimizer}


def check_same_run(found: Path, identity: dict[str, Any]) -> None:
    """A checkpoint of another run is refused, naming the first difference."""
    saved = flat(run_of(found))
    for path, value in flat(identity).items():
        if saved.get(path, value) != value:
            raise ConfigError(
                path,
                f"is {value!r} but {saved[path]!r} in {found}; set it back, or start afresh with "
                "--resume never or another --output_dir",
            )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested dictionaries."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found
