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
    events = folder / "events.out.tfevents.1"
    for damaged in (b"", b"no events at all" * 9):
        events.write_bytes(damaged)
        assert "has event files without a logged step: they are empty or damaged" in problem(folder)
    events.unlink()
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


def test_a_null_in_the_metrics_is_a_loss_that_is_not_finite(tmp_path):
    folder = write_run(tmp_path / "a", lambda _: 4.0)
    lines = (folder / "metrics.jsonl").read_text().splitlines(True)
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"loss/val": None}) + "\n"
    (folder / "metrics.jsonl").write_text("".join(lines))
    run = read_run(folder)
    assert run.diverged_at("loss/val") == 100 and run.counted.span("steps") == (10, 90)


def test_a_run_that_was_extended_is_named_and_is_no_seed_of_one_that_was_not(tmp_path, capsys):
    extensions = [{"step": 40, "changes": {"mode.train.steps": [40, 100], "scheduler": [None, {"type": "WarmupLR"}]}}]
    for seed in range(2):
        write_run(tmp_path / f"a-s{seed}", lambda _: 4.0, mode__seed=seed)
    write_run(tmp_path / "a-s2", lambda _: 4.0, mode__seed=2)
    (tmp_path / "a-s2" / "extensions.json").write_text(json.dumps(extensions))
    found = figures(capsys, tmp_path)
    assert [variant["seeds"] for variant in found["variants"]] == [[0, 1], [2]]
    assert list(found["differences"]) == ["extended"] and found["runs"][2]["extensions"] == extensions
    words = (
        "extended at step 40, its schedules planned anew: mode.train.steps from 40 to 100, "
        'scheduler from null to {"type": "WarmupLR"}'
    )
    assert found["runs"][2]["notes"] == [words]
    assert f"{tmp_path / 'a-s2'} was {words}" in found["verdicts"][0]["remarks"]
    (tmp_path / "a-s2" / "extensions.json").write_text("[1]")
    assert "extensions.json cannot be read" in fails(capsys, tmp_path / "a-s2")


def test_runs_without_overlap_get_a_message_and_no_number(tmp_path, capsys):
    write_run(tmp_path / "small", lambda _: 4.0)
    write_run(tmp_path / "large", lambda _: 3.0, flops=10**12, mode__experts__width=64)
    found = figures(capsys, tmp_path / "small", tmp_path / "large")
    assert found["matched"]["flops"]["points"] == [] and found["verdicts"][0]["at"] is None
    assert "no overlap in training FLOPs" in found["verdicts"][0]["text"]
    assert found["matched"]["steps"]["points"][-1]["loss"]["large"]["mean"] == 3.0
    assert "no overlap" in fails(capsys, tmp_path / "small", tmp_path / "large", "--assert_better", "large", "small")
    assert compare.main([str(tmp_path), "--assert_better", "large", "small", "--at", "steps", "--by", "0.2"]) == 0


def test_a_variant_that_begins_after_others_have_ended_is_left_out_by_name(tmp_path, capsys):
    write_run(tmp_path / "first", lambda _: 4.0)
    write_run(tmp_path / "late", lambda _: 2.0, flops=10**12, mode__experts__width=64)
    write_run(tmp_path / "second", lambda _: 3.0, mode__experts__num_shared=1)
    found = figures(capsys, tmp_path / "first", tmp_path / "late", tmp_path / "second")["matched"]["flops"]
    assert len(found["problems"]) == 1 and "late is first evaluated at" in found["problems"][0]
    last = found["points"][-1]["loss"]
    assert last["late"] is None and (last["first"]["mean"], last["second"]["mean"]) == (4.0, 3.0)


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


def test_a_seed_may_stand_behind_a_space(tmp_path):
    runs = [read_run(write_run(tmp_path / f"moe seed{seed}", lambda _: 4.0, mode__seed=seed)) for seed in (1, 2)]
    assert [variant.label for variant in group_runs(runs)] == ["moe"]


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


def test_copies_of_one_seed_are_no_two_seeds_whatever_they_are_called(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path / f"a-seed{seed}", lambda _: 4.0)  # mode.seed is 0 in both
        write_run(tmp_path / f"b-seed{seed}", lambda _: 3.9, mode__seed=seed, mode__experts__num_shared=1)
    found = figures(capsys, tmp_path, "--baseline", "b")
    assert {v["label"]: v["seeds"] for v in found["variants"]} == {"a-seed0": [0], "a-seed1": [0], "b": [0, 1]}
    assert all("one seed of a-seed" in verdict["text"] for verdict in found["verdicts"])


def test_an_unfinished_seed_is_in_no_final_mean_and_is_named(tmp_path, capsys):
    for seed, steps in enumerate((100, 100, 40)):
        write_run(tmp_path / f"a-seed{seed}", lambda flops, shift=seed: 9 - flops / 1e11 + shift, steps=steps,
                  mode__seed=seed)  # fmt: skip
    write_run(tmp_path / "b", lambda _: 8.0, mode__experts__num_shared=1)
    found = figures(capsys, tmp_path)
    a = found["variants"][0]
    assert (a["final"]["n"], a["final"]["mean"], a["best"]["mean"]) == (2, 8.5, 8.5)
    assert a["left_out"] == [str(tmp_path / "a-seed2")] and a["step_seconds"]["n"] == 3
    assert found["matched"]["flops"]["points"][-1]["loss"]["a"]["n"] == 3
    assert found["verdicts"][0]["remarks"][-1] == f"{tmp_path / 'a-seed2'} ends there"
    compare.main([str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert f"{tmp_path / 'a-seed2'} is not finished" in out


def test_a_run_without_a_place_on_an_axis_takes_no_number_from_the_others(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: math.nan)
    write_run(tmp_path / "b", lambda _: 4.0, mode__experts__num_shared=1)
    write_run(tmp_path / "c", lambda _: 3.0, mode__experts__num_shared=2)
    found = figures(capsys, tmp_path)
    assert found["baseline"] == "b" and [verdict["variant"] for verdict in found["verdicts"]] == ["a", "c"]
    losses = found["matched"]["flops"]["points"][-1]["loss"]
    assert losses["a"] is None and (losses["b"]["mean"], losses["c"]["mean"]) == (4.0, 3.0)
    assert found["matched"]["flops"]["problems"] == [f"{tmp_path / 'a'} has no finite evaluation"]
    compare.main([str(tmp_path)])
    notes = capsys.readouterr().out.split("\nnotes\n")[1].split("config differences")[0]
    assert " ".join(notes.split()).count("has no finite evaluation") == 1, "on four axes, but said once"


def test_half_a_run_among_runs_is_named(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 4.0)
    half = write_run(tmp_path / "half", lambda _: 4.0)
    (half / "config.json").unlink()
    (tmp_path / "begun").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("no run")
    warnings = figures(capsys, tmp_path)["warnings"]
    assert len(warnings) == 2 and "begun" in warnings[0] and "is empty" in warnings[0]
    assert "half" in warnings[1] and "it has no config.json" in warnings[1]


def test_the_ranking_says_who_is_not_through(tmp_path, capsys):
    write_run(tmp_path / "done", lambda _: 4.0, flops=4 * 10**8)
    write_run(tmp_path / "early", lambda _: 5.0, mode__experts__num_shared=1)
    write_run(tmp_path / "late", lambda _: 4.5, flops=42 * 10**7, mode__experts__num_shared=2)
    compare.main([str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert "done 4.0000, late 4.5000, early 5.0000 (through 40% of its steps)" in out
