"""Checkpoints that are complete or absent.

DeepSpeed writes into `step_N.incomplete`. When every rank has finished, a manifest with the size and
checksum of every file is added, the folder is renamed to `step_N`, and only then `latest` is replaced,
by renaming too. Killed at any moment, a save leaves the one before it untouched. A checkpoint whose
files do not match its manifest is passed over for the one before, with a warning.

Knows nothing of what the trainer keeps in a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

from torch import distributed
from tqdm import tqdm

from mode.section import ConfigError
from mode.training.stops import SaveFailed
from mode.training.watchdog import lost_a_rank

MANIFEST = "manifest.json"
STEP = re.compile(r"step_(\d{8})")


def save_checkpoint(
    engine: Any, folder: Path, step: int, state: dict[str, Any], keep_last: int, run: dict[str, Any]
) -> Path:
    """Writes `folder/step_N`, points `latest` at it and deletes all but the newest `keep_last`.

    `state` comes back from `load_checkpoint`; `run` says whose checkpoint it is and can be read without loading.
    """
    name = f"step_{step:08d}"
    incomplete, final = folder / f"{name}.incomplete", folder / name
    rank = distributed.get_rank()
    try:
        if rank == 0:
            shutil.rmtree(incomplete, ignore_errors=True)
        distributed.barrier()
        engine.save_checkpoint(str(folder), tag=incomplete.name, client_state=state, save_latest=False)
        distributed.barrier()  # every rank's files are written
        checksums = _checksums(incomplete, _files(incomplete))
        if rank == 0:
            _write(incomplete / MANIFEST, json.dumps({"step": step, "run": run, "files": checksums}, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            incomplete.rename(final)
            _write(folder / "latest", name)
            for old in complete_checkpoints(folder)[:-keep_last]:
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        if lost_a_rank(error):
            raise  # nothing is deleted: rank 0 may be past its last collective and about to complete this very folder
        reason = _reason(error, folder)
        shutil.rmtree(incomplete, ignore_errors=True)
        raise SaveFailed(
            f"the checkpoint of step {step} could not be written to {folder}: {reason}. The one before it is "
            "untouched; make room and resume"
        ) from error
    distributed.barrier()
    return final


def _reason(error: Exception, folder: Path) -> str:
    """Why a file was not written. torch's writer says "unexpected pos 1024 vs 918" where the disk took only a part."""
    if "unexpected pos" in str(error) or "PytorchStreamWriter failed writing" in str(error):
        return f"no space: the disk took only a part of a file ({shutil.disk_usage(folder).free / 1e9:.2f} GB are free)"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def complete_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step_*") if STEP.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def discard_leftovers(folder: Path) -> None:
    """Deletes what a save or a conversion that was killed has left behind. A collective."""
    if distributed.get_rank() == 0:
        for pattern in ("step_*.incomplete", "step_*.universal*"):
            for leftover in folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
    distributed.barrier()


def discard_after(folder: Path, step: int) -> None:
    """Deletes the checkpoints of later steps: a run that starts at `step` writes its own. A collective."""
    if distributed.get_rank() == 0:
        for stale in complete_checkpoints(folder):
            if step_of(stale) > step:
                shutil.rmtree(stale)
    distributed.barrier()


def step_of(checkpoint: Path) -> int:
    match = STEP.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """What to resume from: `never`, `auto` (the newest that is whole, if any) or a path. Same on every rank."""
    if resume == "never":
        return None
    if resume == "auto":
        return newest_whole(folder)
    if not resume.strip():
        raise ConfigError("--resume", 'is empty; it must be "auto", "never" or a path')
    path = Path(resume)
    if not STEP.fullmatch(path.name) and (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not STEP.fullmatch(path.name) and path.is_dir():
        candidates = complete_checkpoints(path)
        if not candidates:
            raise ConfigError("--resume", f"{resume} holds no complete checkpoint (a folder named step_N)")
        path = candidates[-1]
    if not (path / MANIFEST).is_file():
        raise ConfigError(
            "--resume", f"{resume} is not a complete checkpoint; it must be a folder named step_N, or a run"
        )
    problem = damage(path)
    if problem is not None:
        raise ConfigError("--resume", f"{path} is damaged: {problem}; name another, or use --resume auto")
    return path


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint of a run whose files are as they were written. Same on every rank."""
    for checkpoint in reversed(complete_checkpoints(folder)):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            print(f"warning: {checkpoint} is damaged ({problem}); trying the one before", file=sys.stderr)
    return None


def run_of(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was told about the run."""
    return dict(json.loads((checkpoint / MANIFEST).read_text())["run"])


def load_checkpoint(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restores the engine and returns the state that was saved with it."""
    path, state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise ConfigError("--resume", f"DeepSpeed could not load {checkpoint}")
    return dict(state)


def _files(folder: Path) -> list[str]:
    """As rank 0 sees them: on another node a network file system may be late to list new files. A collective."""
    found: list[Any] = [None]
    if distributed.get_rank() == 0:
        found = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())]
    distributed.broadcast_object_list(found)
    return list(found[0])


def _checksums(folder: Path, files: list[str]) -> dict[str, list[int]]:
    """{file: [size, crc32]}; the ranks share the reading."""
    if not distributed.is_initialized():  # a tool's single process
        return {name: _checksum(folder / name) for name in tqdm(files, desc="checking", leave=False, disable=None)}
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    mine = {name: _checksum(folder / name) for name in files[rank::world_size]}
    parts: list[Any] = [None] * world_size
    distributed.all_gather_object(parts, mine)
    return {name: value for part in parts for name, value in part.items()}


def _checksum(path: Path) -> list[int]:
    """[size, crc32], or [-1, 0] where the file cannot be read."""
    checksum = size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    except OSError:
        return [-1, 0]
    return [size, checksum]


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. A collective, where there is a process group."""
    try:
        expected = json.loads((checkpoint / MANIFEST).read_text())["files"]
        names = sorted(expected)
    except (OSError, ValueError, KeyError, TypeError):
        expected, names = {}, []  # every rank reads the same manifest, so every rank sees the same
    if not names:
        return "its manifest is unreadable"
    actual = _checksums(checkpoint, names)
    wrong = [name for name in names if actual[name] != expected[name]]
    return f"{wrong[0]} does not match the manifest" if wrong else None


def _write(path: Path, text: str) -> None:
    """Replaces a file at once: readers see the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
