"""Run directories, read: what was trained, how its losses went, and which runs are seeds of one variant.

    run = read_run("runs/mode")
    run.counted.at("flops", 4e12)       # the loss that counts when runs are compared, at equal training FLOPs
    run.curve("loss/train").loss

Reads what a run writes while it trains, so a run in progress is as good as a finished one; checkpoints are not loaded.
Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mode import __version__, accounting
from mode.config.file import RunConfig, load_run_config
from mode.config.section import ConfigError, show
from mode.config.settings import ModeConfig
from mode.training.logging.run_files import EVENTS, EXPORTED, EXTENSIONS, METRICS, Row, read_events, read_metrics
from mode.training.logging.run_files import RunError as RunError

AXES = ("steps", "tokens", "flops", "seconds")
TOP_K, CAUSAL = "loss/val", "loss/val_causal"
COUNTED = (
    "loss/counted"  # a copy of the one of the two that counts, so that TensorBoard can lay all runs over each other
)

# What may differ between runs of one variant: seeds, names and directories, and what a run keeps of itself.
NOT_THE_VARIANT = re.compile(
    r"mode\.seed|seed|mode\.description|mode\.data\.cache_dir|(tensorboard|csv_monitor|wandb|comet)(\..*)?"
    r"|mode\.train\.(log_every|save_every|keep_last|stop_after|monitor|watchdog_seconds)"
)
SEED_SUFFIX = re.compile(r"(?:(?:^|[-_. ])s|[-_. ]?seed)[-_.= ]?\d+$")


@dataclass(frozen=True, eq=False)
class Curve:
    """A loss along the four axes, up to the first value that is not finite."""

    x: dict[str, NDArray[np.float64]]  # by axis; NaN where a run did not record it
    loss: NDArray[np.float64]

    def span(self, axis: str) -> tuple[float, float] | None:
        """The first and last place where the loss is known; None without any."""
        x = self.x[axis]
        return (float(x[0]), float(x[-1])) if len(x) and np.isfinite(x).all() else None

    def at(self, axis: str, place: float) -> float:
        """Interpolated, linearly in the logarithm of the axis. Outside the span there is no answer: NaN."""
        span = self.span(axis)
        if span is None or not span[0] <= place <= span[1]:
            return math.nan
        x = self.x[axis]
        if x[0] <= 0:
            return float(np.interp(place, x, self.loss))
        return float(np.interp(math.log(place), np.log(x), self.loss))


@dataclass(frozen=True, eq=False)
class Run:
    directory: Path
    settings: RunConfig  # as resolved by the run
    rows: list[Row]  # the logged steps in order, by tag
    seconds: NDArray[np.float64]  # of training up to each row: no pause, no evaluation, no saving
    planned_steps: int | None
    corpus: dict[str, Any] | None  # documents, tokens and bytes of each split, once there is a checkpoint
    tokenizer: str | None  # a digest of its files
    from_events: bool
    notes: list[str]
    extensions: list[dict[str, Any]]  # {"step", "changes"}: where its plan became another (train.py --extend)

    @property
    def config(self) -> ModeConfig:
        return self.settings.mode

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def label(self) -> str:
        """The directory's name without a seed at its end; of a directory named by its seed alone, its parent's."""
        path = self.directory.absolute()
        return SEED_SUFFIX.sub("", path.name).strip() or path.parent.name

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def finished(self) -> bool:
        return self.planned_steps is not None and self.last["step"] >= self.planned_steps

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        return f"at step {self.last['step']} of {self.planned_steps or '?'}: stopped early or still running"

    @property
    def loss_tag(self) -> str:
        """The validation loss that counts: the causal one of a depth-routed model, as top-k sees the future."""
        return CAUSAL if self.config.depth is not None and self.has(CAUSAL) else TOP_K

    @property
    def bytes_per_token(self) -> float | None:
        """Of the validation text."""
        counts = (self.corpus or {}).get("validation", {})
        return counts["num_bytes"] / counts["num_tokens"] if counts.get("num_tokens") else None

    @cached_property
    def counted(self) -> Curve:
        return self.curve(self.loss_tag)

    def has(self, tag: str) -> bool:
        return any(tag in row for row in self.rows)

    def values(self, tag: str) -> dict[int, float]:
        """By step, as logged."""
        return {int(row["step"]): row[tag] for row in self.rows if tag in row}

    def diverged_at(self, tag: str) -> int | None:
        """The first step whose value is not finite."""
        return next((step for step, value in self.values(tag).items() if not math.isfinite(value)), None)

    def curve(self, tag: str) -> Curve:
        end = self.diverged_at(tag)
        chosen = [index for index, row in enumerate(self.rows) if tag in row and (end is None or row["step"] < end)]
        columns = {"steps": "step", "tokens": "tokens", "flops": "flops"}
        x = {axis: np.array([self.rows[i][name] for i in chosen], dtype=float) for axis, name in columns.items()}
        x["seconds"] = self.seconds[chosen]
        return Curve(x, np.array([self.rows[i][tag] for i in chosen], dtype=float))


# ---------------------------------------------------------------------------------------------------
# Reading


def read_run(directory: str | Path) -> Run:
    """A run with at least one evaluation, or `RunError`."""
    folder = Path(directory)
    if not folder.is_dir():
        raise RunError(folder, "is a file, not a run directory" if folder.exists() else "does not exist")
    if not any(folder.iterdir()):
        raise RunError(folder, "is empty; name the directory of a run, which holds config.json and metrics.jsonl")
    has_metrics, has_events = (folder / METRICS).is_file(), any(folder.glob(EVENTS))
    if (folder / EXPORTED).is_file() and not has_metrics and not has_events:
        raise RunError(
            folder,
            "is an exported model, which has no record of its training; name the run directory it was exported from",
        )
    if not (folder / "config.json").is_file():
        what = "is half-written: it has no config.json" if has_metrics or has_events else "is no run directory"
        raise RunError(folder, f"{what}; name the directory of a run, which holds config.json and metrics.jsonl")
    settings = _read_config(folder)
    if not has_metrics and not has_events:
        raise RunError(folder, f"has no {METRICS} and no event files; the run has logged nothing yet, or was cut short")
    try:
        rows, notes = read_metrics(folder) if has_metrics else read_events(folder)
    except OSError as error:
        raise RunError(folder, f"cannot be read: {error.strerror or error}") from None
    if not rows and not has_metrics:
        raise RunError(folder, "has event files without a logged step: they are empty or damaged, or not of a run")
    if not any(TOP_K in row for row in rows):
        so_far = f"{len(rows)} logged steps, the last is {rows[-1]['step']}" if rows else "no step is logged"
        first = f"the first is after step {settings.mode.train.eval_every}"
        raise RunError(folder, f"has no evaluations yet ({so_far}); {first} (mode.train.eval_every) or the last step")
    rows_missing = _rows_missing(rows, settings.mode.train.log_every)
    if rows_missing:
        notes.append("rows are left out between the logged steps: training time is estimated from the median step")
    extensions = _extensions(folder)
    notes += [describe_extension(extension) for extension in extensions]
    return Run(
        directory=folder,
        settings=settings,
        rows=rows,
        seconds=_training_seconds(_with_median_step(rows) if rows_missing else rows),
        planned_steps=_planned_steps(settings, rows),
        corpus=_corpus(folder),
        tokenizer=_digest(folder / "tokenizer"),
        from_events=not has_metrics,
        notes=notes,
        extensions=extensions,
    )


def find_runs(path: str | Path) -> list[Path]:
    """`path` itself if it is a run directory, or else the run directories directly in it, half-written ones too."""
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return [folder]
    return sorted(child for child in folder.iterdir() if _looks_like_a_run(child)) or [folder]


def _looks_like_a_run(folder: Path) -> bool:
    """By what a run writes first, or by holding nothing yet: half a run is to be named, not overlooked."""
    if not folder.is_dir():
        return False
    names = [child.name for child in folder.iterdir()]
    return not names or any(name in ("config.json", METRICS) or fnmatch(name, EVENTS) for name in names)


def _read_config(folder: Path) -> RunConfig:
    try:
        return load_run_config(folder / "config.json")
    except ConfigError as error:
        if error.path == "file":
            raise RunError(folder, f"config.json {error.problem}; the directory is half-written or damaged") from None
        raise RunError(
            folder,
            f"config.json does not fit this version of mode ({__version__}): {error.path}: {error.problem}. "
            "Read it with the version that wrote it",
        ) from None


def _rows_missing(rows: Sequence[Row], log_every: int) -> bool:
    """Whether a record was thinned out: what a row says of the steps since the one before it is then of a few only."""
    steps = [0.0, *(row["step"] for row in rows if "perf/step_seconds" in row)]
    return any(later - earlier > log_every for earlier, later in pairwise(steps))


def _with_median_step(rows: Sequence[Row]) -> list[Row]:
    median = statistics.median(row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row)
    return [row | {"perf/step_seconds": median} for row in rows]


def _training_seconds(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Summed from the mean seconds per step that each logged step reports of the steps before it.

    Those leave out evaluation, saving and the time between the parts of a resumed run. Steps between a checkpoint and
    the logged step before it, run again after a resume, count once.
    """
    steps, seconds, rate = [0.0], [0.0], math.nan
    for row in rows:
        if "perf/step_seconds" in row:
            rate = row["perf/step_seconds"]
            seconds.append(seconds[-1] + rate * (row["step"] - steps[-1]))
            steps.append(row["step"])
    places = np.array([row["step"] for row in rows], dtype=float)
    beyond = np.maximum(places - steps[-1], 0)
    return np.interp(places, steps, seconds) + np.where(beyond > 0, beyond * rate, 0.0 if len(steps) > 1 else math.nan)


def _planned_steps(settings: RunConfig, rows: Sequence[Row]) -> int | None:
    """How many steps the configuration asks for, on the number of ranks that the logged tokens imply."""
    engine = settings.engine
    global_rows = rows[-1]["tokens"] / rows[-1]["step"] / settings.mode.model.sequence_length
    world_size = 1
    if engine.micro_batch_size is not None and (engine.accumulation_steps or engine.train_batch_size is None):
        world_size = round(global_rows / (engine.micro_batch_size * (engine.accumulation_steps or 1)))
    try:
        return accounting.num_steps(settings, max(1, world_size))
    except ConfigError:
        return None


def _corpus(folder: Path) -> dict[str, Any] | None:
    """From the newest complete checkpoint's manifest."""
    for manifest in sorted(folder.glob("checkpoints/step_*/manifest.json"), reverse=True):
        try:
            return json.loads(manifest.read_text(encoding="utf-8"))["run"]["corpus"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _extensions(folder: Path) -> list[dict[str, Any]]:
    try:
        listed = json.loads((folder / EXTENSIONS).read_text(encoding="utf-8"))
        return [{"step": int(one["step"]), "changes": dict(one["changes"])} for one in listed]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError):
        raise RunError(folder, f"{EXTENSIONS} cannot be read; resume the run, which writes it anew") from None


def describe_extension(extension: dict[str, Any]) -> str:
    """One entry of `Run.extensions` in words."""
    changes = (f"{path} from {show(then)} to {show(now)}" for path, (then, now) in extension["changes"].items())
    return f"extended at step {extension['step']}, its schedules planned anew: {', '.join(changes)}"


def _digest(tokenizer: Path) -> str | None:
    files = [tokenizer / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files):
        return None
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# ---------------------------------------------------------------------------------------------------
# Variants


@dataclass(frozen=True)
class Variant:
    """Runs whose configurations differ only in seeds, names and directories.

    Two runs of one seed are no two seeds: they are variants of their own, told apart by their directories.
    """

    label: str
    runs: tuple[Run, ...]


def group_runs(runs: Iterable[Run]) -> list[Variant]:
    """The variants in the order of their first run, each under a name of its own."""
    members: list[list[Run]] = []
    for run in runs:
        for group in members:
            if not _differ({"a": run, "b": group[0]}):
                group.append(run)
                break
        else:
            members.append([run])
    members = [part for group in members for part in _seeds_apart(group)]
    labels = [_label(group, 0) for group in members]
    for detail in range(1, 20):
        clashing = {label for label in labels if labels.count(label) > 1}
        labels = [
            _label(group, detail) if label in clashing else label for group, label in zip(members, labels, strict=True)
        ]
    return [Variant(label, tuple(group)) for group, label in zip(members, labels, strict=True)]


def _seeds_apart(group: list[Run]) -> list[list[Run]]:
    if _all_seeds_differ(group):
        return [group]
    parts: dict[tuple[Path, str], list[Run]] = {}
    for run in group:
        parts.setdefault((run.directory.absolute().parent, run.label), []).append(run)
    return [
        piece for part in parts.values() for piece in ([part] if _all_seeds_differ(part) else [[run] for run in part])
    ]


def _all_seeds_differ(runs: Sequence[Run]) -> bool:
    return len({run.seed for run in runs}) == len(runs)


def _label(group: list[Run], detail: int) -> str:
    """More and more of the path, until it tells the variants apart."""
    if detail:
        return "/".join(group[0].directory.absolute().parts[-detail:])
    labels = [run.label for run in group]
    prefix = os.path.commonprefix(labels)
    return labels[0] if len(set(labels)) == 1 or not prefix.strip("-_. ") else prefix.rstrip("-_. ")


def differences(variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
    """{setting: {variant: value}} of the settings that differ. A section that one variant lacks is one entry."""
    return _differ({variant.label: variant.runs[0] for variant in variants})


def _differ(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    trees = {
        name: {**run.settings.deepspeed, "mode": run.config.to_dict(), "extended": run.extensions or None}
        for name, run in runs.items()
    }
    return {path: values for path, values in tree_differences(trees) if not NOT_THE_VARIANT.fullmatch(path)}


def tree_differences(trees: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, dict[str, Any]]]:
    """(dotted path, {name: value}) of the settings in which named trees of JSON values differ."""
    if not all(isinstance(tree, dict) for tree in trees.values()):
        first, *others = trees.values()
        if any(other != first for other in others):
            yield prefix, trees
        return
    names = list(dict.fromkeys(name for tree in trees.values() for name in tree))
    for name in names:
        inner = {label: tree.get(name) for label, tree in trees.items()}
        yield from tree_differences(inner, f"{prefix}.{name}" if prefix else name)
