"""`tools/compare.py` on event files and on tiny runs that were really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from mode.runs import read_run
from tests import launch
from tests.compare_tool.written_runs import figures, power_law, write_run


def test_event_files_stand_in_for_metrics(tmp_path, capsys):
    law = power_law(2.0, 3.0, 0.5)
    folder = write_run(tmp_path / "a", law, flops=10**10)
    write_run(tmp_path / "b", law, flops=10**10)
    with SummaryWriter(str(folder)) as board:
        for row in launch.metrics(folder):
            for tag, value in row.items():
                if "/" in tag:
                    board.add_scalar(tag, value, row["step"])
            for name in ("train", "val"):
                if f"loss/{name}" in row:
                    board.add_scalar(f"loss_by_tokens/{name}", row[f"loss/{name}"], row["tokens"])
                    board.add_scalar(f"loss_by_flops/{name}", row[f"loss/{name}"], row["flops"] // 10**9)
    (folder / "metrics.jsonl").unlink()
    found = figures(capsys, folder, tmp_path / "b", "--assert_equal")
    a, b = found["runs"]
    assert "event files" in a["notes"][0]
    for name in ("step", "tokens", "flops", "seconds", "planned_steps", "best_step"):
        assert a[name] == pytest.approx(b[name], rel=1e-6), name
    assert a["final"] == pytest.approx(law(10**12), rel=1e-6)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """One run in one go, and the same run in two parts."""
    folder = tmp_path_factory.mktemp("compare")
    config = launch.write_tiny(folder)
    whole, parts = folder / "runs" / "whole", folder / "runs" / "parts"
    common = ["--deepspeed_config", str(config), "--output_dir"]
    launch.run([*common, str(whole)], folder / "whole.log")
    launch.run([*common, str(parts), "--set", "mode.train.stop_after=5"], folder / "first.log")
    launch.run([*common, str(parts)], folder / "second.log")
    return folder / "runs"


def test_a_real_run_and_its_resumed_twin_are_equal_to_the_bit(real, capsys):
    found = figures(capsys, real, "--assert_equal")
    assert found["assertions"][0]["holds"] and not found["differences"]
    assert [variant["label"] for variant in found["variants"]] == ["parts", "whole"], "one seed twice is no two seeds"
    assert found["verdicts"][0]["difference"] == 0
    rows = launch.metrics(real / "whole")
    _, run = found["runs"]
    assert run["final"] == rows[-1]["loss/val_causal"] and run["final_top_k"] == rows[-1]["loss/val"]
    assert run["best"] == min(row["loss/val_causal"] for row in rows if "loss/val_causal" in row)
    assert run["seconds"] == pytest.approx(sum(row["perf/step_seconds"] for row in rows))
    assert run["flops_per_token"] == rows[-1]["flops"] / rows[-1]["tokens"]
    assert run["peak_memory_bytes"] == max(row["perf/peak_memory_bytes"] for row in rows)
    assert 2**27 < run["peak_memory_bytes"] < 2**35
    assert run["finished"] and run["planned_steps"] == 12
    manifest = json.loads((real / "whole" / "checkpoints" / "step_00000012" / "manifest.json").read_text())
    counts = manifest["run"]["corpus"]["validation"]
    assert run["bytes_per_token"] == counts["num_bytes"] / counts["num_tokens"]


def test_losses_by_time_are_at_the_training_time_of_the_metrics_also_after_a_resume(real):
    for name in ("whole", "parts"):
        run, board = read_run(real / name), EventAccumulator(str(real / name), size_guidance={"scalars": 0}).Reload()
        for tag in ("train", "counted"):
            seconds = [round(time) for time, row in zip(run.seconds, run.rows, strict=True) if f"loss/{tag}" in row]
            assert [event.step for event in board.Scalars(f"loss_by_time/{tag}")] == seconds, (name, tag)


def test_a_real_run_reads_the_same_from_its_event_files(real, tmp_path, capsys):
    (tmp_path / "events").mkdir()
    for file in (real / "whole").iterdir():
        if file.name == "config.json" or file.name.startswith("events."):
            (tmp_path / "events" / file.name).write_bytes(file.read_bytes())
    found = figures(capsys, real / "whole", tmp_path / "events", "--assert_equal")
    whole, events = found["runs"]
    assert events["final"] == pytest.approx(whole["final"], rel=1e-6)
    assert (events["step"], events["tokens"]) == (whole["step"], whole["tokens"])
    assert events["flops"] is None and "FLOPs left out" in events["notes"][1], "a tiny run has less than 100 GFLOPs"
    assert "did not record its training FLOPs" in found["matched"]["flops"]["problems"][0]
