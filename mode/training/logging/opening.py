"""How a run begins: its directory is taken, its weights may come from an exported model, and it is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import distributed

from mode.config.file import RunConfig
from mode.config.section import ConfigError, show
from mode.data import PackedData, Tokenizer
from mode.training.checkpoints.checkpoint import as_rank_0_sees
from mode.training.logging.console import plan_table
from mode.training.logging.run_files import EXTENSIONS, METRICS
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import check_same_model


def lock_directory(run_dir: Path) -> FileLock:
    """Keeps a second run out of the directory. Held until the process ends, however it ends. A collective."""
    lock = FileLock(run_dir / ".lock", timeout=0)
    problems: list[str | None] = [None]
    if distributed.get_rank() == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            problems = [f"{run_dir} is in use by another run; wait for it, or name another directory"]
        except OSError as error:
            problems = [f"{run_dir} cannot be written to: {error.strerror or error}; name another directory"]
    distributed.broadcast_object_list(problems)
    if problems[0] is not None:
        raise ConfigError("--output_dir", problems[0])
    return lock


def start_from(model: ModeTransformer, folder: str, tokenizer: Tokenizer) -> None:
    """Gives a new run's model the weights of an exported folder; one of another model or tokenizer is refused."""
    check_same_model(model.config, folder)
    if not tokenizer.same_as(Tokenizer.load(folder)):
        raise ConfigError(
            "mode.train.init_from",
            f"{folder} was trained with another tokenizer than this run's, so its tokens mean something else; use its "
            f'own: set mode.data.tokenizer to "pretrained" and mode.data.pretrained to {show(folder)}',
        )
    model.load_pretrained(folder)


def write_settings(run: RunConfig, data: PackedData, run_dir: Path, extensions: list[dict[str, Any]]) -> None:
    """Writes what resuming needs, the whole configuration and the tokenizer, and where the plan became another."""
    mode = run.mode.to_dict()
    mode["train"]["stop_after"] = None
    settings = {**run.deepspeed, "mode": mode}
    (run_dir / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    data.tokenizer.save(run_dir / "tokenizer")
    if extensions:
        (run_dir / EXTENSIONS).write_text(json.dumps(extensions, indent=2) + "\n")
    else:
        (run_dir / EXTENSIONS).unlink(missing_ok=True)  # of a run that was here before


def description(
    run: RunConfig,
    data: PackedData,
    run_dir: Path,
    backend: tuple[str, str] | None,
    found: Path | None,
    step: int,
) -> str:
    """The run in words and numbers; `found` is the checkpoint it goes on from, at `step`."""
    counts, weights = data.train.counts, run.mode.train.init_from
    lines = [f"{run.mode.description}\n", plan_table(run, distributed.get_world_size())]
    if backend is not None:
        lines.append("  experts          {} ({})".format(*backend))
    lines.append(
        f"  data             {data.source}: {counts.num_tokens:,} training tokens in "
        f"{counts.num_documents:,} documents\n  run directory    {run_dir}"
    )
    fresh = "starting at step 0" + (f" with the weights of {weights}" if weights is not None else "")
    lines.append(f"  {fresh if found is None else f'resuming from {found} at step {step}'}\n")
    return "\n".join(lines)


def check_own_directory(found: Path, run_dir: Path) -> None:
    """Refuses to go on from another run's checkpoint in a directory that holds a run of its own, which it would mix."""
    own = run_dir / "checkpoints"
    if found.resolve().parent == own.resolve():
        return
    held = as_rank_0_sees(lambda: (run_dir / METRICS).exists() or any(own.glob("step_*")))
    if held:
        raise ConfigError(
            "--output_dir",
            f"{run_dir} holds a run of its own, and {found} is of another; name a directory that does not exist yet",
        )
