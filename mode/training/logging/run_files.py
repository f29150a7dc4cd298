"""The logged steps of a run directory, from `metrics.jsonl` or, where that is missing, from TensorBoard event files.

Knows the layout of the files and nothing of what the values mean. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mode.config.section import InputError

METRICS, EVENTS = "metrics.jsonl", "events.out.tfevents.*"
EXPORTED = "model.safetensors"  # what `tools/export.py` writes, and a run does not
POSITION = ("step", "tokens", "flops")  # every logged step has them, beside its values
EXTENSIONS = "extensions.json"  # where and how the plan of a run became another (train.py --extend), if it did
# Tags whose x axis is tokens, training GFLOPs or seconds of training.
BY_TOKENS, BY_FLOPS, BY_TIME = "loss_by_tokens/", "loss_by_flops/", "loss_by_time/"
GIGA = 10**9
FEWEST_GFLOPS = 100  # event files know whole GFLOPs: below this they are off by more than 1 %

Row = dict[str, float]


class RunError(InputError):
    """A directory holds no run that can be read. The message names it, says why and what to do."""

    def __init__(self, directory: str | Path, problem: str) -> None:
        self.directory, self.problem = Path(directory), problem
        super().__init__(f"{directory}: {problem}")


def read_metrics(directory: Path) -> tuple[list[Row], list[str]]:
    """The rows of `metrics.jsonl` by step, and what is worth knowing about the file. A null is a value not finite."""
    lines = (directory / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[float, Row] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return _ordered(rows), [f"the last line of {METRICS} is cut off and was left out"]
            raise RunError(
                directory, f"line {number} of {METRICS} is damaged: {line[:40]!r}; resume the run or restore the file"
            ) from None
        _check_row(directory, number, row)
        rows[row["step"]] = {tag: math.nan if value is None else value for tag, value in row.items()}
    return _ordered(rows), []


def _check_row(directory: Path, number: int, row: Any) -> None:
    known = isinstance(row, dict) and all(_is_number(row.get(name)) and row[name] > 0 for name in POSITION)
    if not known or not all(value is None or _is_number(value) for value in row.values()):
        raise RunError(
            directory,
            f"line {number} of {METRICS} is not a logged step with {', '.join(POSITION)} and numbers; another version "
            "or another program wrote it: read it with that one",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_events(directory: Path) -> tuple[list[Row], list[str]]:
    """The rows as TensorBoard has them: values in float32, FLOPs in whole GFLOPs.

    The events of one logged step stand together, so those by tokens and GFLOPs belong to the step before them. Those by
    time tell nothing more: the seconds of a step are logged at full precision.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    rows: dict[float, Row] = {}
    step = 0
    for file in sorted(directory.glob(EVENTS)):
        for record in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.WhichOneof("value") != "simple_value":
                    continue
                if value.tag.startswith(BY_TIME):
                    continue
                if value.tag.startswith(BY_TOKENS):
                    rows.setdefault(step, {"step": step})["tokens"] = event.step
                elif value.tag.startswith(BY_FLOPS):
                    rows.setdefault(step, {"step": step})["flops"] = event.step * GIGA
                else:
                    step = event.step
                    rows.setdefault(step, {"step": step})[value.tag] = value.simple_value
    whole = {step: row for step, row in rows.items() if step > 0 and all(name in row for name in POSITION)}
    notes = ["read from TensorBoard event files: values in float32, FLOPs in whole GFLOPs"]
    if whole and max(row["flops"] for row in whole.values()) < FEWEST_GFLOPS * GIGA:
        notes.append(f"FLOPs left out: event files count whole GFLOPs, and the run has fewer than {FEWEST_GFLOPS}")
        for row in whole.values():
            row["flops"] = math.nan
    return _ordered(whole), notes


def _ordered(rows: dict[float, Row]) -> list[Row]:
    return [rows[step] for step in sorted(rows)]
