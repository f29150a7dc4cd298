"""`mode.runs` and `tools/compare.py`: on run directories with closed-form curves, and on tiny real runs."""

from __future__ import annotations

import copy
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from mode.runs import RunError, find_runs, group_runs, read_run
from tests import launch

sys.path.append(str(launch.ROOT / "tools"))  # as when the tool is run as a script
from tools import compare  # noqa: E402

TOKENS = 128  # per step: train_batch_size 4 x sequence_length 32


def settings(**changes: Any) -> dict[str, Any]:
    """A whole configuration without depth routing; `changes` by dotted path, with __ for the dots."""
    document = copy.deepcopy(launch.TINY)
    document["mode"]["depth"] = None
    document["mode"]["train"] |= {"steps": 100, "log_every": 5, "eval_every": 10}
    for path, value in changes.items():
        *parents, name = path.split("__")
        here = document
        for parent in parents:
            here = here[parent]
        here[name] = value
    return document


def write_run(
    folder: Path,
    loss: Callable[[float], float],
    *,
    steps: int = 100,
    flops: int = 10**9,
    seconds: float = 0.5,
    causal: Callable[[float], float] | None = None,
    corpus: dict[str, int] | None = None,
    **changes: Any,
) -> Path:
    """`loss` of the training FLOPs; `flops` and `seconds` per step; logged every 5 steps and evaluated every 10."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings(**changes)))
    rows = []
    for step in range(5, steps + 1, 5):
        done = flops * step
        row = {"step": step, "tokens": TOKENS * step, "flops": done, "loss/train": loss(done) + 0.1}
        row |= {"perf/step_seconds": seconds, "perf/tokens_per_second": TOKENS / seconds}
        row |= {"perf/peak_memory_bytes": 2**30 + step, "experts/no_op_share": step / 100, "experts/dropped_share": 0.0}
        if step % 10 == 0:
            row["loss/val"] = loss(done)
            if causal is not None:
                row["loss/val_causal"] = causal(done)
        rows.append(row)
    write_rows(folder, rows)
    if corpus is not None:
        checkpoint = folder / "checkpoints" / "step_00000100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"run": {"corpus": {"validation": corpus}}}))
    return folder


def write_rows(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def power_law(floor: float, scale: float, exponent: float) -> Callable[[float], float]:
    return lambda flops: floor + scale * (flops / 1e9) ** -exponent


def figures(capsys, *arguments: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert compare.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def fails(capsys, *arguments: Any) -> str:
    assert compare.main([*map(str, arguments)]) == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------
# Numbers


def test_a_curve_that_is_linear_in_the_logarithm_is_interpolated_exactly(tmp_path, capsys):
    """B takes 0.7e9 FLOPs a step and 0.2 s, so the matched places fall between the evaluations of A."""
    write_run(tmp_path / "a", lambda flops: 9 - 0.2 * math.log(flops), seconds=0.5)
    write_run(tmp_path / "b", lambda flops: 8 - 0.1 * math.log(flops), flops=7 * 10**8, seconds=0.2, mode__seed=0,
              mode__experts__width=16)  # fmt: skip
    found = figures(capsys, tmp_path / "a", tmp_path / "b", "--points", 3)
    low, high = 10e9, 70e9
    places = [low + (high - low) / 3, low + 2 * (high - low) / 3, high]
    points = found["matched"]["flops"]["points"]
    assert [point["at"] for point in points] == pytest.approx(places, rel=1e-12)
    for point, x in zip(points, places, strict=True):
        assert point["loss"]["a"]["mean"] == pytest.approx(9 - 0.2 * math.log(x), rel=1e-12)
        assert point["loss"]["b"]["mean"] == pytest.approx(8 - 0.1 * math.log(x), rel=1e-12)
    at_time = found["matched"]["seconds"]["points"][-1]  # B ends after 20 s, when A is at step 40
    assert at_time["at"] == pytest.approx(20)
    assert at_time["loss"]["a"]["mean"] == pytest.approx(9 - 0.2 * math.log(40e9), rel=1e-12)
    assert at_time["loss"]["b"]["mean"] == pytest.approx(8 - 0.1 * math.log(70e9), rel=1e-12)
    at_tokens = found["matched"]["tokens"]["points"][-1]
    assert at_tokens["at"] == 100 * TOKENS and at_tokens["loss"]["a"]["mean"] == 9 - 0.2 * math.log(100e9)
    assert found["matched"]["steps"]["points"][-1]["at"] == 100
    a, b = 9 - 0.2 * math.log(70e9), 8 - 0.1 * math.log(70e9)
    (verdict,) = found["verdicts"]
    assert (verdict["variant"], verdict["baseline"], verdict["at"]) == ("b", "a", 70e9)
    assert verdict["difference"] == pytest.approx(b - a, rel=1e-9)
    assert verdict["percent"] == pytest.approx(100 * (b - a) / a, rel=1e-9)
    assert verdict["outside_spread"] is None and "one seed of b and of a: spread unknown" in verdict["text"]


def test_nothing_is_extrapolated(tmp_path):
    curve = read_run(write_run(tmp_path / "a", lambda flops: 9 - 0.2 * math.log(flops))).curve("loss/val")
    assert curve.span("flops") == (10e9, 100e9)
    assert curve.at("flops", 10e9) == 9 - 0.2 * math.log(10e9) and curve.at("flops", 100e9) == curve.loss[-1]
    assert math.isnan(curve.at("flops", 9.9e9)) and math.isnan(curve.at("flops", 101e9))


def test_power_laws_are_interpolated_closely(tmp_path, capsys):
    slow, fast = power_law(2.0, 3.0, 0.5), power_law(2.1, 2.0, 0.4)
    write_run(tmp_path / "slow", slow)
    write_run(tmp_path / "fast", fast, flops=65 * 10**7, mode__experts__top_k=2)
    found = figures(capsys, tmp_path / "slow", tmp_path / "fast")
    for point in found["matched"]["flops"]["points"]:
        assert point["loss"]["slow"]["mean"] == pytest.approx(slow(point["at"]), rel=0.01)
        assert point["loss"]["fast"]["mean"] == pytest.approx(fast(point["at"]), rel=0.01)
    assert found["matched"]["flops"]["points"][-1]["at"] == 65e9


def test_final_best_costs_and_shares_are_those_of_the_rows(tmp_path, capsys):
    write_run(tmp_path / "a", lambda flops: 3 + (flops / 1e9 - 60) ** 2 / 1e4)  # best at step 60
    (run,) = figures(capsys, tmp_path / "a")["runs"]
    assert (run["final"], run["best"], run["best_step"]) == (3 + 1600 / 1e4, 3.0, 60)
    assert run["final_train"] == 3 + 1600 / 1e4 + 0.1 and run["final_causal"] is None
    assert (run["step"], run["tokens"], run["flops"], run["seconds"]) == (100, 12800, 100e9, 50.0)
    assert run["flops_per_token"] == 1e9 / TOKENS and run["tokens_per_second"] == 12800 / 50
    assert run["step_seconds"] == 0.5 and run["peak_memory_bytes"] == 2**30 + 100
    assert run["no_op_share"] == pytest.approx(statistics.fmean(step / 100 for step in range(55, 101, 5)))
    assert run["dropped_share"] == 0.0 and run["kept_share"] is None
    assert run["finished"] and run["planned_steps"] == 100


def test_seeds_of_one_variant_are_grouped_with_mean_and_spread(tmp_path, capsys):
    shifts = {"moe": [0.0, 0.01, 0.05], "mode": [-0.2, -0.22]}
    for name, values in shifts.items():
        for seed, shift in enumerate(values):
            write_run(
                tmp_path / f"{name}_seed{seed}",
                lambda flops, shift=shift: 4 + shift - 0.1 * math.log(flops / 1e9),
                mode__seed=seed,
                mode__description=f"{name} {seed}",
                tensorboard={"enabled": True, "job_name": f"{name}{seed}"},
                mode__experts__num_shared=int(name == "mode"),
            )
    found = figures(capsys, tmp_path, "--baseline", "moe")
    variants = {variant["label"]: variant for variant in found["variants"]}
    assert {label: variant["seeds"] for label, variant in variants.items()} == {"mode": [0, 1], "moe": [0, 1, 2]}
    assert found["differences"] == {"mode.experts.num_shared": {"mode": 1, "moe": 0}}
    end = 4 - 0.1 * math.log(100)
    assert variants["moe"]["final"]["mean"] == pytest.approx(end + 0.02)
    deviation = math.sqrt((0.02**2 + 0.01**2 + 0.03**2) / 2)
    assert variants["moe"]["final"]["std"] == pytest.approx(deviation)
    assert (variants["moe"]["final"]["min"], variants["moe"]["final"]["max"]) == pytest.approx((end, end + 0.05))
    (verdict,) = found["verdicts"]
    assert verdict["difference"] == pytest.approx(-0.23) and verdict["outside_spread"] is True
    limit = 2 * math.hypot(deviation, 0.02 / math.sqrt(2))
    assert f"= {limit:.4f} with sample standard deviations" in verdict["text"] and "outside" in verdict["text"]


def test_a_difference_within_the_spread_is_called_so(tmp_path, capsys):
    for name, shifts in {"a": [0.0, 0.1], "b": [0.02, 0.09]}.items():
        for seed, shift in enumerate(shifts):
            changes = {"mode__seed": seed, "mode__experts__num_shared": int(name == "b")}
            write_run(tmp_path / f"{name}-s{seed}", lambda _, shift=shift: 4 + shift, **changes)
    (verdict,) = figures(capsys, tmp_path)["verdicts"]
    assert verdict["variant"] == "b" and verdict["outside_spread"] is False
    assert "within the seeds' spread" in verdict["text"] and "their ranges meet" in verdict["text"]


def test_the_causal_loss_counts_where_tokens_are_routed_by_depth(tmp_path, capsys):
    depth = {"capacity_fraction": 0.25, "predictor": {"width": 8}}
    write_run(tmp_path / "moe", lambda _: 4.0)
    write_run(tmp_path / "mod", lambda _: 3.5, causal=lambda _: 3.8, mode__depth=depth)
    found = figures(capsys, tmp_path / "moe", tmp_path / "mod")
    assert found["verdicts"][0]["percent"] == pytest.approx(-5) and not found["warnings"]
    assert (found["runs"][1]["final"], found["runs"][1]["final_top_k"]) == (3.8, 3.5)
    assert found["differences"]["mode.depth"]["moe"] is None
    write_run(tmp_path / "old", lambda _: 3.5, mode__depth=depth, mode__experts__num_shared=1)
    assert "sees the future" in figures(capsys, tmp_path / "moe", tmp_path / "old")["warnings"][0]


def test_training_time_has_no_pause_and_no_evaluation(tmp_path):
    """Resumed at step 12 after a pause: the row of step 15 tells the mean of steps 13 to 15 alone."""
    folder = write_run(tmp_path / "a", lambda _: 4.0)
    place = [{"step": step, "tokens": step * TOKENS, "flops": step * 10**9} for step in (5, 7, 10, 15, 18)]
    values = [{"perf/step_seconds": 2.0}, {"loss/val": 4.0}, {"perf/step_seconds": 1.0}, {"perf/step_seconds": 3.0}, {}]
    write_rows(folder, [a | b for a, b in zip(place, values, strict=True)])
    run = read_run(folder)
    assert run.curve("loss/val").at("seconds", 12) == 4.0
    assert run.seconds.tolist() == [10, 12, 15, 30, 39]
    assert run.state == "at step 18 of 100: stopped early or still running" and not run.finished


# ---------------------------------------------------------------------------------------------------
# What cannot be read, and what can all the same


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


# ---------------------------------------------------------------------------------------------------
# Losses that are not of the same thing


def test_other_tokens_are_compared_by_bytes_and_other_text_is_not_compared(tmp_path, capsys):
    counts = {"num_documents": 3, "num_tokens": 1000, "num_bytes": 4000}
    tokens = {"mode__model__vocab_size": 600}
    write_run(tmp_path / "a", lambda _: 4.0, corpus=counts)
    write_run(tmp_path / "b", lambda _: 2.5, corpus=counts | {"num_tokens": 2000}, **tokens)
    found = figures(capsys, tmp_path / "a", tmp_path / "b")
    assert found["unit"] == "bits per byte" and "different tokenizers or vocabularies" in found["warnings"][0]
    assert [run["final"] for run in found["runs"]] == pytest.approx([4 / math.log(2) / 4, 2.5 / math.log(2) / 2])
    assert found["verdicts"][0]["percent"] == pytest.approx(25), "more bits, although fewer nats per token"
    assert compare.main([str(tmp_path), "--assert_better", "b", "a", "--json"]) == 1
    assert "warning: the runs have different tokenizers" in capsys.readouterr().err, "loud beside JSON, too"
    assert "name two variants" in fails(capsys, tmp_path, "--assert_better", "a", "a")

    write_run(tmp_path / "c", lambda _: 2.5, **tokens)
    assert "NOT COMPARABLE" in figures(capsys, tmp_path / "a", tmp_path / "c")["verdicts"][0]["text"]
    assert "bytes per token are known from checkpoints only" in fails(
        capsys, tmp_path / "a", "--assert_better", "a", tmp_path / "c"
    )

    write_run(tmp_path / "d", lambda _: 2.5, corpus=counts | {"num_bytes": 5000}, mode__seed=1)
    found = figures(capsys, tmp_path / "a", tmp_path / "d")
    assert "different text (validation bytes: 4000 and 5000)" in found["warnings"][0]
    three = figures(capsys, *(tmp_path / name for name in "abd"), "--baseline", "b")
    assert "NOT COMPARABLE" in three["verdicts"][0]["text"], "a and d are seeds of one variant, on different text"
    write_run(tmp_path / "e", lambda _: 2.5, mode__train__eval_sequences=9)
    found = figures(capsys, tmp_path / "a", tmp_path / "e")
    assert "mode.train.eval_sequences: 5 and 9" in found["warnings"][0]
    assert "NOT COMPARABLE" not in found["verdicts"][0]["text"]


# ---------------------------------------------------------------------------------------------------
# Assertions and usage


def test_assert_better_knows_its_margin(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 3.96)  # 1 % below
    write_run(tmp_path / "b", lambda _: 4.0, mode__experts__num_shared=1)

    def code(*arguments: str) -> int:
        return compare.main([str(tmp_path), "--assert_better", *arguments])

    assert code("a", "b") == 0 and code("a", "b", "--by", "0.0099") == 0
    assert code("a", "b", "--by", "0.0101") == 1
    assert "a is 1.000% below b" in capsys.readouterr().err
    assert code("b", "a") == 1 and code("b", "b") == 2  # a variant is not better than itself
    folders = [str(tmp_path / name) for name in "ab"]
    assert compare.main(["--assert_better", *folders, "--by", "0.005"]) == 0, "run directories will do"
    assert "neither a run directory nor one of the variants: a, b" in fails(
        capsys, tmp_path, "--assert_better", "a", "c"
    )


def test_assert_equal_sees_the_last_bit(tmp_path, capsys):
    law = power_law(2.0, 3.0, 0.5)
    write_run(tmp_path / "a", law)
    write_run(tmp_path / "b", law, seconds=0.7)
    pair = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.main([*pair, "--assert_equal"]) == 0
    rows = launch.metrics(tmp_path / "b")
    row = next(row for row in rows if row["step"] == 50)
    row["loss/val"] = math.nextafter(row["loss/val"], 9)
    write_rows(tmp_path / "b", rows)
    capsys.readouterr()
    assert compare.main([*pair, "--assert_equal"]) == 1
    error = capsys.readouterr().err
    assert "differ in loss/val at 1 of 10 steps, first at step 50" in error and "loss/train" not in error
    assert compare.main([*pair, "--assert_equal", "--tolerance", "1e-12"]) == 0
    write_rows(tmp_path / "b", rows[:-1])
    assert compare.main([*pair, "--assert_equal", "--tolerance", "1"]) == 1, "a run that ends earlier is not equal"
    assert "only one has it at step 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["RUN", "--points", "0"],
        ["RUN", "--tolerance", "0.1"],
        ["RUN", "--by", "0.1"],
        ["RUN", "--assert_better", "a", "b", "--by", "1.5"],
        ["RUN", "--json", "--markdown"],
        ["RUN", "--plot", "curves.txt"],
        ["RUN", "--at", "epochs"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_assert_equal_of_one_run_and_a_run_that_does_not_exist_are_errors(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 4.0)
    assert "needs at least two runs" in fails(capsys, tmp_path / "a", tmp_path / "a", "--assert_equal")
    assert "does not exist" in fails(capsys, tmp_path / "a", tmp_path / "z")


def test_the_report_is_a_table_in_the_terminal_and_markdown_in_a_file(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", lambda _: 4.0)
    write_run(tmp_path / "runs" / "b", lambda _: 3.0, mode__experts__num_shared=1)
    assert compare.main([str(tmp_path / "runs"), "--write", str(tmp_path / "report.md")]) == 0
    printed, written = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert "b against a at equal training FLOPs" in printed and "| b | 3.0000 | 3.0000 |" in written
    assert "mode.experts.num_shared: a = 0; b = 1" in printed and "- mode.experts.num_shared" in written
    tables = [block.splitlines() for block in written.split("\n\n") if block.startswith("|")]
    assert len(tables) == 7 and all(len({line.count("|") for line in table}) == 1 for table in tables)
    compare.main([str(tmp_path / "runs"), "--markdown"])
    assert capsys.readouterr().out == written


def test_the_plot_is_a_picture_and_without_matplotlib_a_message(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "a", power_law(2.0, 3.0, 0.5))
    picture = tmp_path / "curves.png"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert "pip install -e '.[plots]'" in fails(capsys, tmp_path / "a", "--plot", picture)
    image = pytest.importorskip("matplotlib.image")
    assert compare.main([str(tmp_path / "a"), "--plot", str(picture)]) == 0
    pixels = image.imread(picture)
    blue = (abs(pixels[..., :3] - [0.0, 0x72 / 255, 0xB2 / 255]) < 0.01).all(axis=-1)
    assert pixels.shape[:2] == (750, 1800) and blue[:, :900].sum() > 500 and blue[:, 900:].sum() > 500


def test_help_is_quick_and_has_examples():
    command = [sys.executable, "-X", "importtime", str(launch.ROOT / "tools" / "compare.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--assert_better mode moe --by 0.01" in done.stdout and "Exit codes" in done.stdout
    assert "numpy" not in done.stderr and "torch" not in done.stderr


# ---------------------------------------------------------------------------------------------------
# Event files, and real runs


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
    assert "did not record its training FLOPs" in found["matched"]["flops"]["problem"]
