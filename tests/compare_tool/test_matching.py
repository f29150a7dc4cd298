"""The numbers of `tools/compare.py`, on curves whose losses are known in closed form."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from mode.runs import read_run
from tests.compare_tool.written_runs import TOKENS, figures, power_law, write_rows, write_run


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
                mode__train__save_every=10 + seed,
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


def test_of_a_record_without_all_rows_training_time_is_estimated_from_the_median_step(tmp_path):
    """A row tells the seconds of the steps since the logged one before it, which is not there: one was slow."""
    folder = write_run(tmp_path / "a", lambda _: 4.0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [row | {"perf/step_seconds": 30.0 if row["step"] == 50 else 0.5} for row in rows if row["step"] % 10 == 0]
    write_rows(folder, kept)
    run = read_run(folder)
    assert run.seconds.tolist() == [0.5 * row["step"] for row in kept]
    assert "training time is estimated" in run.notes[0] and not read_run(write_run(tmp_path / "b", lambda _: 4.0)).notes


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
