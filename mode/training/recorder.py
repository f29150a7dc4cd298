"""What a run writes down while it trains: `metrics.jsonl` and, through DeepSpeed's monitor, TensorBoard,
CSV, W&B or Comet. On rank 0; on the others every method does nothing.

After a resume both continue as if there had been no interruption: what was logged after the checkpoint
is taken out first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from mode.run_files import BY_FLOPS, BY_TOKENS
from mode.training.engine import MONITORS
from mode.training.picture import draw_decisions


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
        if self.active:
            run_dir.mkdir(parents=True, exist_ok=True)
            _prune_metrics(self.file, last_step)
            if board.get("enabled") and Path(board["output_path"], board["job_name"]) == run_dir:
                _prune_events(run_dir, last_step)  # a folder the user named may hold other runs: left alone
        self.monitor = MonitorMaster(get_monitor_config(monitors))
        tensorboard = self.monitor.tb_monitor
        self.board = tensorboard.summary_writer if tensorboard is not None else None

    def write(self, position: Mapping[str, int], values: Mapping[str, float]) -> None:
        """One line of metrics and one event per value, at full precision."""
        if not self.active:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({**position, **values}) + "\n")
        events = [(tag, value, position["step"]) for tag, value in values.items()]
        for tag in ("train", "val"):
            if f"loss/{tag}" in values:
                loss = values[f"loss/{tag}"]
                events.append((f"{BY_TOKENS}{tag}", loss, position["tokens"]))
                events.append((f"{BY_FLOPS}{tag}", loss, position["flops"] // 10**9))
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
        for summary in hparams(plain, {"loss/val": 0.0}):
            self.board.file_writer.add_summary(summary)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _prune_metrics(file: Path, step: int) -> None:
    """Drops lines after `step`, and a last line that was cut off by a crash."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(file)


def _prune_events(folder: Path, last_step: int) -> None:
    """Rewrites the event files without what was logged after `last_step`.

    TensorBoard's own way, a purge step, knows one x axis per run; ours are steps, tokens and GFLOPs. The
    events of one `write` stand together, so those by tokens and GFLOPs go with the step before them.
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
            if not any(tag.startswith((BY_TOKENS, BY_FLOPS)) for tag in tags):
                step = event.step
            if tags and step <= last_step:
                writer.add_event(event)
    writer.close()
    for file in files:
        file.unlink()
