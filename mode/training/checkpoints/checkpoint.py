"""Checkpoints that are complete or absent.

DeepSpeed writes into `step_N.incomplete`. When every rank has finished, a manifest with the size and
checksum of every file is added, the folder is renamed to `step_N`, and only then `latest` is replaced,
by renaming too. Killed at any moment, a save leaves the one before it untouched. A checkpoint whose
files do not match its manifest is passed over for the one before, with a warning, and kept aside. Where all are
damaged, or one cannot be read, nothing is resumed and nothing deleted.

What there is to resume from is what rank 0 sees: on a network file system the other ranks may see another listing.

Knows nothing of what the trainer keeps in a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed
from tqdm import tqdm

from mode.config.section import ConfigError
from mode.training.checkpoints.unpickling import weights_only
from mode.training.safety.stops import SaveFailed
from mode.training.safety.watchdog import lost_a_rank

MANIFEST = "manifest.json"
STEP = re.compile(r"step_(\d{8})")
CHUNK = 1 << 22  # bytes read at a time
PART = CHUNK << 6  # bytes that a rank reads before it meets the others
Seen = TypeVar("Seen")


def save_checkpoint(
    engine: Any,
    folder: Path,
    step: int,
    state: dict[str, Any],
    keep_last: int,
    run: dict[str, Any],
    progress: Callable[[], None],
) -> Path:
    """Writes `folder/step_N`, points `latest` at it and deletes all but the newest `keep_last`.

    `state` comes back from `load_checkpoint`; `run` says whose checkpoint it is and can be read without loading.
    `progress` is called again and again while the files are read back; while they are written, the folder grows.
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
        checksums = _checksums(incomplete, _files(incomplete), progress)
        missing = [name for name, found in checksums.items() if found is None]
        if missing:
            raise FileNotFoundError(f"{incomplete / missing[0]} has gone")
        if rank == 0:
            _write(incomplete / MANIFEST, json.dumps({"step": step, "run": run, "files": checksums}, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            incomplete.rename(final)
            _write(folder / "latest", name)
            for old in complete_checkpoints(folder)[:-keep_last]:
                with contextlib.suppress(OSError):  # the new one is complete; the next save tries again
                    _delete(old)
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
    return [path for path in numbered(folder) if (path / MANIFEST).is_file()]


def numbered(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, also those whose manifest has gone: no save leaves such a one."""
    try:
        names = os.listdir(folder)  # unlike glob, it does not take an I/O error for an empty folder
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if STEP.fullmatch(name)]


def num_bytes(folder: Path) -> int:
    """All that a folder holds; files that come and go meanwhile count or do not."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


def discard_leftovers(folder: Path) -> None:
    """Deletes what a save or a conversion that was killed has left behind. A collective."""
    if distributed.get_rank() == 0:
        for pattern in ("step_*.incomplete", "step_*.universal*"):
            for leftover in folder.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
    distributed.barrier()


def clear_after(folder: Path, step: int, set_aside: bool) -> None:
    """Deletes the checkpoints of later steps: a run that starts at `step` writes its own. A collective.

    With `set_aside` they are renamed to `step_N.damaged` instead: those that were passed over, for a person to look at.
    """
    if distributed.get_rank() == 0:
        for stale in numbered(folder):
            if step_of(stale) > step and not set_aside:
                _delete(stale)
            elif step_of(stale) > step:
                names = (f"{stale.name}.damaged" + (f".{number}" if number else "") for number in count())
                stale.rename(next(folder / name for name in names if not (folder / name).exists()))
    distributed.barrier()


def _delete(checkpoint: Path) -> None:
    """Deletes a checkpoint; killed meanwhile, it leaves what `discard_leftovers` deletes."""
    leftover = checkpoint.with_name(f"{checkpoint.name}.incomplete")
    shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.rename(leftover)
    shutil.rmtree(leftover, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    match = STEP.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def find_checkpoint(resume: str, folder: Path, progress: Callable[[], None]) -> Path | None:
    """Chooses what to resume from: `never`, `auto` (the newest that is whole, if any) or a path. A collective."""
    if resume == "never":
        return None
    if resume == "auto":
        found = newest_whole(folder, progress)
        if found is None and as_rank_0_sees(partial(numbered, folder)):
            raise ConfigError(
                "--resume",
                f'is "auto", but every checkpoint in {folder} is damaged; nothing was changed or deleted. Put back a '
                "copy of one, or start afresh: with another --output_dir, or with --resume never, which deletes them",
            )
        return found
    if not resume.strip():
        raise ConfigError("--resume", 'is empty; it must be "auto", "never" or a path')
    path, lack = as_rank_0_sees(partial(_named, resume))
    problem = lack or damage(path, progress)
    if lack is None and problem is not None:
        problem = f"{path} is damaged: {problem}; name another, or use --resume auto"
    if problem is not None:
        raise ConfigError("--resume", problem)
    return path


def _named(resume: str) -> tuple[Path, str | None]:
    """(the checkpoint that a path means, why there is none)."""
    path = Path(resume)
    if not STEP.fullmatch(path.name) and (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not STEP.fullmatch(path.name) and path.is_dir():
        candidates = complete_checkpoints(path)
        if not candidates:
            return path, f"{resume} holds no complete checkpoint (a folder named step_N)"
        path = candidates[-1]
    if not (path / MANIFEST).is_file():
        return path, f"{resume} is not a complete checkpoint; it must be a folder named step_N, or a run"
    return path, None


def newest_whole(folder: Path, progress: Callable[[], None] = lambda: None) -> Path | None:
    """The newest checkpoint of a run whose files are as they were written. A collective, in a process group."""
    for checkpoint in reversed(as_rank_0_sees(partial(numbered, folder))):
        problem = damage(checkpoint, progress)
        if problem is None:
            return checkpoint
        if not distributed.is_initialized() or distributed.get_rank() == 0:
            print(f"warning: {checkpoint} is damaged ({problem}); trying the one before", file=sys.stderr)
    return None


def as_rank_0_sees(look: Callable[[], Seen]) -> Seen:
    """Returns on every rank what `look` returns, or raises the OSError it raises, on rank 0. A collective."""
    if not distributed.is_initialized():
        return look()
    seen: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            seen = [look()]
        except OSError as error:
            seen = [error]
    distributed.broadcast_object_list(seen)
    if isinstance(seen[0], OSError):
        raise seen[0]
    found: Seen = seen[0]
    return found


def run_of(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was told about the run."""
    return dict(json.loads((checkpoint / MANIFEST).read_text())["run"])


def load_checkpoint(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restores the engine and returns the state that was saved with it."""
    with weights_only(checkpoint):
        path, state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise ConfigError("--resume", f"DeepSpeed could not load {checkpoint}")
    return dict(state)


def damage(checkpoint: Path, progress: Callable[[], None] = lambda: None) -> str | None:
    """What is wrong with a checkpoint's files, or None. A collective, in a process group.

    A file that the system fails to read is no damage but an OSError: it may be whole a minute later.
    """
    try:
        expected = as_rank_0_sees(partial(_expected, checkpoint))
        actual = {} if isinstance(expected, str) else _checksums(checkpoint, sorted(expected), progress)
    except OSError as error:
        raise OSError(
            f"{checkpoint} cannot be read: {error}. It may be whole, so nothing was resumed or deleted; start the same "
            "command again when it can be read"
        ) from error
    if isinstance(expected, str):
        return expected
    for name, found in actual.items():
        if found != expected[name]:
            return f"{name} {'is missing' if found is None else 'does not match the manifest'}"
    return None


def _expected(checkpoint: Path) -> dict[str, Any] | str:
    """{file: [size, crc32]} of the manifest, or what is wrong with it."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "its manifest is missing"
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        return "its manifest is unreadable"
    for key in ("run", "files"):
        if not isinstance(manifest.get(key), dict) or not manifest[key]:
            return f'its manifest has no "{key}"'
    run = manifest["run"]
    for key in ("mode", "plan", "layout"):
        if not isinstance(run.get(key, {}), dict) or (key == "mode" and not run.get(key)):
            return f'its manifest has no "run.{key}"'
    return dict(manifest["files"])


def _files(folder: Path) -> list[str]:
    return as_rank_0_sees(lambda: sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))


def _checksums(folder: Path, files: list[str], progress: Callable[[], None]) -> dict[str, list[int] | None]:
    """{file: [size, crc32], or None where there is no such file}. A collective, in a process group.

    The ranks share the reading and meet after every part of it, so that none waits long for another. What the system
    fails to read on one rank is an OSError on all.
    """
    alone = not distributed.is_initialized()
    rank, world_size = (0, 1) if alone else (distributed.get_rank(), distributed.get_world_size())
    mine = files[rank::world_size]
    reading = _read(folder, tqdm(mine, desc="checking", leave=False, disable=None) if alone else mine)
    found: dict[str, Any] = {}
    parts: list[Any] = [{}]
    while any(part is not None for part in parts):
        progress()
        parts = [next(reading, None)]
        if not alone:
            part, parts = parts[0], [None] * world_size
            distributed.all_gather_object(parts, part)
        for part in parts:
            found |= part or {}
    for result in found.values():
        if isinstance(result, OSError):
            raise result
    return dict(sorted(found.items()))


def _read(folder: Path, names: Iterable[str]) -> Iterator[dict[str, list[int] | OSError | None]]:
    """Reads files part by part: {} after a part, {file: [size, crc32], None or the error} at its end."""
    for name in names:
        result: list[int] | OSError | None
        checksum = size = 0
        try:
            if (folder / name).is_file():  # a device would be read for ever
                with (folder / name).open("rb") as file:
                    while chunk := file.read(CHUNK):
                        checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
                        if size % PART == 0:
                            yield {}
                result = [size, checksum]
            else:
                result = None
        except FileNotFoundError:
            result = None
        except OSError as error:
            result = error
        yield {name: result}


def _write(path: Path, text: str) -> None:
    """Replaces a file at once: readers see the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
