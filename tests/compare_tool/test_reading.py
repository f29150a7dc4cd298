"""`mode.runs`: directories that cannot be read, and what can be read all the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mode.runs import RunError, find_runs, group_runs, read_run
from tests.compare_tool.written_runs import compare, fails, figures, write_run


def test_every_unreadable_directory_is_one_clear_error(tmp_path):
    def problem(folder: Path) -> str:
        with pytest.raises(RunError) as caught:
            read_run(folder)
        text = str(caught.value)
        assert text.startswith(f"{folder}: ") and "\n" not in text
        return text

    assert "does not exist" in problem(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in problem(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is empty" in problem(tmp_path / "empty")
    folder = write_run(tmp_path / "half", lambda _: 4.0)
    document, lines = (folder / "config.json").read_text(), (folder / "metrics.jsonl").read_text().splitlines(True)
    (folder / "metrics.jsonl").write_text("".join([*lines[:4], lines[4][:30] + "\n", *lines[5:]]))
    assert "line 5 of metrics.jsonl is damaged" in problem(folder)
    (folder / "metrics.jsonl").write_text(lines[0])
    assert "no evaluations yet (1 logged steps, the last is 5); the first is after step 10" in problem(folder)
    (folder / "metrics.jsonl").write_text("")
    assert "no step is logged" in problem(folder)
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 5, "val_loss": 4.0}) + "\n")
    assert "line 1" in problem(folder) and "another version" in problem(folder)
    (folder / "metrics.jsonl").unlink()
    assert "has logged nothing yet" in problem(folder)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(document[:100])
    assert "half-written" in problem(folder) and "not valid JSON" in problem(folder)
    (folder / "config.json").write_text(document.replace('"top_k"', '"topk"'))
    assert "does not fit this version of mode" in problem(folder) and "mode.experts.topk" in problem(folder)
    (folder / "config.json").unlink()
    assert "it has no config.json" in problem(folder)


def test_an_exported_model_is_named_as_such(tmp_path, capsys):
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format_version": 1, "mode_version": "0.1.0", "mode": {}}))
    (folder / "model.safetensors").write_bytes(b"")
    error = fails(capsys, folder)
    assert "is an exported model, which has no record of its training; name the run directory" in error


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path):
    folder = write_run(tmp_path / "a", lambda _: 4.0)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-40])
    run = read_run(folder)
    assert run.last["step"] == 95 and "cut off" in run.notes[0]


def test_losses_that_are_not_finite_end_a_curve(tmp_path, capsys):
    write_run(tmp_path / "good", lambda _: 4.0)
    write_run(tmp_path / "bad", lambda flops: 3.0 if flops < 65e9 else math.nan, mode__experts__num_shared=1)
    found = figures(capsys, tmp_path / "good", tmp_path / "bad")
    bad = found["runs"][1]
    assert (bad["final"], bad["best"], bad["best_step"], bad["diverged_at"]) == (None, 3.0, 10, 70)
    (verdict,) = found["verdicts"]
    assert verdict["at"] == 60e9 and "bad is not finite from step 70 on" in verdict["text"]
    code = compare.main([*map(str, (tmp_path / "good", tmp_path / "bad")), "--assert_better", "bad", "good"])
    assert code == 1 and "not finite from step 70" in capsys.readouterr().err


def test_runs_without_overlap_get_a_message_and_no_number(tmp_path, capsys):
    write_run(tmp_path / "small", lambda _: 4.0)
    write_run(tmp_path / "large", lambda _: 3.0, flops=10**12, mode__experts__width=64)
    found = figures(capsys, tmp_path / "small", tmp_path / "large")
    assert found["matched"]["flops"]["points"] == [] and found["verdicts"][0]["at"] is None
    assert "no overlap in training FLOPs" in found["verdicts"][0]["text"]
    assert found["matched"]["steps"]["points"][-1]["loss"]["large"]["mean"] == 3.0
    assert "no overlap" in fails(capsys, tmp_path / "small", tmp_path / "large", "--assert_better", "large", "small")
    assert compare.main([str(tmp_path), "--assert_better", "large", "small", "--at", "steps"]) == 0


def test_a_run_that_stopped_early_is_named_and_how_far_it_is(tmp_path, capsys):
    write_run(tmp_path / "whole", lambda _: 4.0)
    write_run(tmp_path / "short", lambda _: 4.0, steps=40, mode__experts__num_shared=1)
    found = figures(capsys, tmp_path / "whole", tmp_path / "short")
    assert not found["runs"][1]["finished"] and found["runs"][1]["planned_steps"] == 100
    assert "whole is only through 40% of its steps there" in found["verdicts"][0]["text"]
    compare.main([str(tmp_path / "short")])
    assert "stopped early or running" in capsys.readouterr().out


def test_a_directory_of_runs_stands_for_its_runs(tmp_path, capsys):
    write_run(tmp_path / "b", lambda _: 4.0)
    write_run(tmp_path / "a", lambda _: 4.0, mode__experts__width=16)
    (tmp_path / "a text file").write_text("")
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    found = figures(capsys, tmp_path)
    assert [run["variant"] for run in found["runs"]] == ["b"]
    assert "passed over" in found["warnings"][0] and "no evaluations yet" in found["warnings"][0]
    assert "no evaluations yet" in fails(capsys, tmp_path / "a")


def test_variants_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for parent, width in (("x", 16), ("y", 32)):
        write_run(tmp_path / parent / "moe", lambda _: 4.0, mode__experts__width=width)
    runs = [read_run(tmp_path / parent / "moe") for parent in ("x", "y")]
    assert [variant.label for variant in group_runs(runs)] == ["x/moe", "y/moe"]


def test_the_same_seeds_before_and_after_a_change_are_two_variants(tmp_path):
    folders = [tmp_path / code / f"seed{seed}" for code in ("before", "after") for seed in (0, 1)]
    runs = [read_run(write_run(folder, lambda _: 4.0, mode__seed=int(folder.name[-1]))) for folder in folders]
    assert [(v.label, [run.seed for run in v.runs]) for v in group_runs(runs)] == [
        ("before", [0, 1]),
        ("after", [0, 1]),
    ]
    assert [variant.label for variant in group_runs(runs[:2])] == ["before"]
