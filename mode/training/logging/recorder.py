"""What a run writes down while it trains: `metrics.jsonl` and, through DeepSpeed's monitor, TensorBoard,
CSV, W&B or Comet. On rank 0; on the others every method does nothing.

After a resume both continue as if there had been no interruption: what was logged after the checkpoint
is taken out first.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor, distributed
from torch.utils.tensorboard.summary import hparams

from mode.config.section import ConfigError
from mode.training.logging.picture import draw_decisions
from mode.training.logging.run_files import BY_FLOPS, BY_TIME, BY_TOKENS, Row
from mode.training.loop.engine import MONITORS

PACKAGES = {"wandb": "wandb", "comet": "comet_ml"}  # of the monitors that are not installed with this one


def check_monitors(settings: Mapping[str, Any]) -> None:
    """Refuses a monitor whose package is missing where it is needed, on rank 0. A collective."""
    missing: list[Any] = [None]
    if distributed.get_rank() == 0:
        enabled = [name for name in PACKAGES if settings.get(name, {}).get("enabled")]
        missing = [next((name for name in enabled if importlib.util.find_spec(PACKAGES[name]) is None), None)]
    distributed.broadcast_object_list(missing)
    name = missing[0]
    if name is not None:
        raise ConfigError(
            f"{name}.enabled",
            f"is true, but the package {PACKAGES[name]} is not installed: pip install {PACKAGES[name]}, or set it to "
            "false",
        )


class Recorder:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], rank: int, last_step: int) -> None:
        """`settings` are DeepSpeed's; `last_step` is where the run continues from."""
        self.file = run_dir / "metrics.jsonl"
        self.active = rank == 0
        monitors = {name: dict(settings[name]) for name in MONITORS if name in settings}
        board = monitors.get("tensorboard", {})
        for name in ("tensorboard", "csv_monitor"):  # DeepSpeed joins the two: files land in the run directory itself
            section = monitors.get(name, {})
            section.setdefault("job_name", run_dir.name)
            if not section.get("output_path"):
                section |= {"output_path": str(run_dir.parent), "job_name": run_dir.name}
        self.time = TrainingTime()
        if self.active:
            run_dir.mkdir(parents=True, exist_ok=True)
            for row in _prune_metrics(self.file, last_step):
                self.time.after(row)
            if board.get("enabled") and Path(board["output_path"], board["job_name"]) == run_dir:
                _prune_events(run_dir, last_step)  # a folder the user named may hold other runs: left alone
        self.monitor = MonitorMaster(get_monitor_config(monitors))
        tensorboard = self.monitor.tb_monitor
        self.board = tensorboard.summary_writer if tensorboard is not None else None

    def write(self, position: Mapping[str, int], values: Mapping[str, float]) -> None:
        """One line of metrics and one event per value, at full precision."""
        if not self.active:
            return
        plain = {tag: value if math.isfinite(value) else None for tag, value in values.items()}  # JSON has no NaN
        with self.file.open("a") as file:
            file.write(json.dumps({**position, **plain}, allow_nan=False) + "\n")
        seconds = self.time.after({**position, **values})
        events = [(tag, value, position["step"]) for tag, value in values.items()]
        for tag in ("train", "val", "counted"):
            if f"loss/{tag}" in values:
                loss = values[f"loss/{tag}"]
                events.append((f"{BY_TOKENS}{tag}", loss, position["tokens"]))
                events.append((f"{BY_FLOPS}{tag}", loss, position["flops"] // 10**9))
                events.append((f"{BY_TIME}{tag}", loss, round(seconds)))
        self.monitor.write_events(events)

    def write_histogram(self, tag: str, values: Tensor, step: int) -> None:
        if self.board is not None:
            self.board.add_histogram(tag, values.detach().float().cpu(), step)

    def write_decisions(self, work_XL: Tensor, step: int) -> None:
        """As `decision_image` gives it."""
        if self.board is not None:
            self.board.add_image("routing/decisions", draw_decisions(work_XL), step, dataformats="HWC")

    def write_text(self, tag: str, text: str, step: int) -> None:
        if self.board is not None:
            self.board.add_text(tag, "    " + text.replace("\n", "\n    "), step)

    def write_hparams(self, settings: Mapping[str, Any]) -> None:
        """So that TensorBoard can filter and group runs; into the run itself, not a run of its own."""
        if self.board is None:
            return
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in settings.items()
        }
        for summary in hparams(plain, {"loss/counted": 0.0}):
            self.board.file_writer.add_summary(summary)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


class TrainingTime:
    """Seconds of training, without evaluation, saving and pauses, added up from the logged rows of a run."""

    def __init__(self) -> None:
        self.step, self.seconds, self.per_step = 0.0, 0.0, 0.0  # up to the last row that tells the seconds of a step

    def after(self, row: Row) -> float:
        """Up to this row, the next of the run. One without seconds is taken to be as fast as the one before."""
        steps, told = row["step"] - self.step, row.get("perf/step_seconds")
        if told is None:
            return self.seconds + self.per_step * steps
        self.step, self.seconds, self.per_step = row["step"], self.seconds + told * steps, told
        return self.seconds


def _prune_metrics(file: Path, step: int) -> list[Row]:
    """Drops lines after `step`, and a last line that was cut off by a crash. Returns the rows that are left."""
    if not file.exists():
        return []
    kept, rows = [], []
    for line in file.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["step"] <= step:
                kept.append(line + "\n")
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            continue
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(file)
    return rows


def _prune_events(folder: Path, last_step: int) -> None:
    """Rewrites the event files without what was logged after `last_step`.

    TensorBoard's own way, a purge step, knows one x axis per run; ours are steps, tokens, GFLOPs and seconds. The
    events of one `write` stand together, so those by another axis go with the step before them.
    """
    files = sorted(folder.glob("events.out.tfevents.*"))
    if not files or last_step == 0:
        for file in files:
            file.unlink()
        return
    writer = EventFileWriter(str(folder), filename_suffix=".resumed")
    step, seen = 0, set()  # a crash in the middle of this function leaves every event twice
    for file in files:
        for record in RawEventFileLoader(str(file)).Load():
            if record in seen:
                continue
            seen.add(record)
            event = Event.FromString(record)
            tags = [value.tag for value in event.summary.value]
            if not any(tag.startswith((BY_TOKENS, BY_FLOPS, BY_TIME)) for tag in tags):
                step = event.step
            if tags and step <= last_step:
                writer.add_event(event)
    writer.close()
    for file in files:
        file.unlink()
