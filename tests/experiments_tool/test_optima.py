"""What is reported of runs whose losses have a closed form."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from mode import accounting
from mode.config.file import load_run_config
from tests import closed_form_train as closed_form
from tests.experiments_tool.using import STAND_IN, isoflop, optima, run_tool, sweep

SIZES = ("1x32", "2x32", "2x48", "3x64", "4x64")


def test_isoflop_finds_the_known_optima_and_what_they_cost(tmp_path, capsys, configs):
    output = tmp_path / "out"
    base = ["--config", *configs, "--output", output, "--sizes", *SIZES, "--command", STAND_IN]
    command = [*base, "--budgets", "1e10", "--seeds", 0, 2, "--write", tmp_path / "report.md"]
    found = run_tool(isoflop, capsys, *command)
    assert {member["state"] for member in found["members"]} == {"finished"} and len(found["members"]) == 20
    dense, mod = found["isoflop"]
    for row, routed in ((dense, False), (mod, True)):
        loss = closed_form.FLOOR - closed_form.GAIN * routed + closed_form.PER_SEED  # mean of the seeds 0 and 2
        assert row["optimum"]["parameters"] == pytest.approx(closed_form.OPTIMUM[routed], rel=1e-6)
        assert row["optimum"]["loss"] == pytest.approx(loss, rel=1e-9)
        assert row["fit"]["rms"] == pytest.approx(closed_form.PER_SEED, rel=1e-6)  # each seed is so far from the mean
        assert row["problem"] is None
    family = {name: _family(configs[name == "mod"]) for name in ("dense", "mod")}
    costs = {name: _cost_at(family[name], closed_form.OPTIMUM[name == "mod"]) for name in family}
    assert dense["optimum"]["relative_flops"] == 1 and dense["optimum"]["relative_loss"] == 0
    assert mod["optimum"]["relative_flops"] == pytest.approx(costs["mod"] / costs["dense"], rel=1e-6)
    assert mod["optimum"]["relative_loss"] == pytest.approx(-closed_form.GAIN / dense["optimum"]["loss"], rel=1e-6)
    best = {name: min(family[name], key=lambda item: item[2]) for name in family}
    for name, row in (("dense", dense), ("mod", mod)):
        parameters, flops, loss = best[name]
        assert row["best"]["parameters"] == parameters
        assert row["best"]["loss"] == pytest.approx(loss + closed_form.PER_SEED)
        assert row["best"]["relative_flops"] == pytest.approx(flops / best["dense"][1])
        relative = (loss + closed_form.PER_SEED) / (best["dense"][2] + closed_form.PER_SEED) - 1
        assert row["best"]["relative_loss"] == pytest.approx(relative)
    good = [flops for parameters, flops, loss in family["mod"] if loss <= best["dense"][2]]
    cheapest = mod["cheapest_as_good_as_baseline"]
    assert len(good) > 0 and cheapest["flops_per_token"] == pytest.approx(min(good))
    assert cheapest["as_good_as"] == f"dense's best member, {dense['best']['size']}"
    assert "the seeds' spread (2 and 2 seeds" in cheapest["seeds"] and dense["cheapest_as_good_as_baseline"] is None
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG") and Path(found["plot"]).parent == output
    assert "| mod | 1e10 | fitted optimum |" in (tmp_path / "report.md").read_text()


def _family(config: Path) -> list[tuple[int, float, float]]:
    """(parameters, forward FLOPs per token, loss of seed 0) of the sizes, without the tool's own planning."""
    family = []
    for size in SIZES:
        layers, width = map(int, size.split("x"))
        document = json.loads(config.read_text())
        heads = width // 16
        document["mode"]["model"] |= {"num_layers": layers, "width": width, "num_heads": heads, "ffn_width": width}
        document["mode"]["model"]["num_kv_heads"] = {2: 1, 3: 1, 4: 2}[heads]
        path = config.with_name("resized.json")
        path.write_text(json.dumps(document))
        resized = load_run_config(path).mode
        counts = accounting.expected_counts(resized, 4)
        forward = accounting.model_flops(resized, counts).forward / (4 * 32)
        family.append((accounting.num_parameters(resized), forward, closed_form.loss_of(resized)))
    return family


def _cost_at(family: list[tuple[int, float, float]], parameters: float) -> float:
    low = max(item for item in family if item[0] <= parameters)
    high = min(item for item in family if item[0] >= parameters)
    share = math.log(parameters / low[0]) / math.log(high[0] / low[0])
    return low[1] ** (1 - share) * high[1] ** share


def test_isoflop_says_when_the_optimum_is_at_the_edge_and_takes_the_best_member_instead(tmp_path, capsys, configs):
    base = ["--config", *configs, "--output", tmp_path / "out", "--command", STAND_IN, "--budgets", "1e10"]
    found = run_tool(isoflop, capsys, *base, "--sizes", "1x32", "1x48", "2x32", "--axis", "active")
    dense, mod = found["isoflop"]
    assert dense["optimum"] is None and "add sizes above it" in dense["problem"]
    assert dense["best"]["relative_flops"] == 1 and mod["best"]["relative_flops"] != 1
    assert found["axis"] == "active" and dense["fit"]["high"] == max(
        member["plan"]["active_parameters"] for member in found["members"] if member["config"] == "dense"
    )
    assert "one seed of" in mod["cheapest_as_good_as_baseline"]["seeds"]
    two = run_tool(isoflop, capsys, *base, "--sizes", "1x32", "1x48", "--report")
    assert two["isoflop"][0]["fit"] is None and two["isoflop"][0]["problem"].startswith("2 finished of the 3 sizes")


def curve(losses: dict[str, tuple[float, float]]) -> optima.Curve:
    """Of sizes by name: (parameters, loss)."""
    points = []
    for size, (parameters, loss) in losses.items():
        cost = SimpleNamespace(parameters=parameters, active_parameters=parameters, flops_per_token=parameters)
        member = SimpleNamespace(budget=1e10, label="moe", size=size)
        figures = {"final": {"n": 1, "mean": loss, "std": None, "min": loss, "max": loss}}
        points.append(SimpleNamespace(member=member, cost=cost, losses=(loss,), mean=loss, name=size, figures=figures))
    (found,) = optima.curves(points, "parameters")
    return found


def test_there_is_no_optimum_where_the_best_size_is_at_the_edge_or_no_parabola_fits():
    good = curve({"2x64": (1e5, 3.1), "3x64": (2e5, 3.0), "4x64": (4e5, 3.1)})
    assert good.optimum is not None and good.optimum.parameters == pytest.approx(2e5) and good.problem is None
    edge = curve({"2x64": (1e5, 3.0), "3x64": (1.2e5, 3.001), "4x64": (4e5, 3.3)})  # lowest between the first two
    assert edge.curve is not None and edge.curve.lowest is not None and edge.optimum is None
    assert edge.problem == "the best size, 2x64, is at the edge of the family: no optimum found (add sizes below it)"
    assert edge.reference is edge.best
    far = {"2x64": (640704, 2.2559), "3x64": (928256, 1.9495), "4x64": (1215808, 1.9355), "6x64": (1790912, 1.9499)}
    steep = curve(far)  # its parabola would be lowest at 1.898, below every size
    assert steep.optimum is None and steep.curve is None and steep.reference.loss == 1.9355
    assert steep.problem.startswith("no parabola: the best one misses a size by 1.7%")


def test_seeds_are_averaged_and_causal_losses_count(tmp_path, capsys, configs):
    arguments = ["--config", *configs, "--output", tmp_path / "out", "--command", STAND_IN, "--seeds", 0, 1, 5]
    found = run_tool(sweep, capsys, *arguments, "--vary", "mod:mode.depth.capacity_fraction=0.25,0.5", "--flops", "1e9")
    labels = ["dense", "mod capacity_fraction=0.25", "mod capacity_fraction=0.5"]
    assert [point["label"] for point in found["points"]] == labels
    for point, config in zip(found["points"], (configs[0], configs[1], configs[1]), strict=True):
        loss = closed_form.loss_of(load_run_config(config).mode)
        losses = [loss + closed_form.PER_SEED * seed for seed in (0, 1, 5)]
        assert point["seeds"] == [0, 1, 5]
        assert point["loss"]["mean"] == pytest.approx(statistics.mean(losses))
        assert point["loss"]["std"] == pytest.approx(statistics.stdev(losses))
        gain = closed_form.TOP_K_GAIN if point["config"] == "mod" else 0.0
        assert point["measured_final_top_k"]["mean"] == pytest.approx(point["loss"]["mean"] - gain)
    assert not found["warnings"]
    planned = run_tool(sweep, capsys, *arguments, "--flops", "2e9", "--plan")
    assert {member["state"] for member in planned["members"]} == {"not started"}  # another budget, another directory


def test_the_best_variation_is_found_by_the_seeds_that_all_have(tmp_path, capsys, configs):
    """Seeds 1 and 2 add 0.01 and 0.02. The smaller capacity is better, but lost its best seed."""
    output = tmp_path / "out"
    arguments = [
        "--config",
        configs[1],
        "--output",
        output,
        "--vary",
        "mode.depth.predictor.width=8,16",
        "--flops",
        "1e9",
    ]
    run_tool(sweep, capsys, *arguments, "--command", STAND_IN, "--seeds", 0, 1, 2)
    small, large = (closed_form.loss_of(load_run_config(output / f"mod-width={width}-1e09-seed0" / "config.json").mode)
                    for width in (8, 16))  # fmt: skip
    better, worse, gap = ("8", "16", large - small) if small < large else ("16", "8", small - large)
    shutil.rmtree(output / f"mod-width={better}-1e09-seed0")
    assert sweep.main([*map(str, arguments), "--seeds", "0", "1", "2", "--report"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"best of 2 variations of mod: mod width={better}, {min(small, large) + 0.015:.4f}" in out
    assert f"(seeds 1, 2), {gap:.4f} ahead of mod width={worse}; within the seeds' spread" in out
    assert (
        f"not all of the seeds 0, 1, 2 are finished, or meant to be, everywhere: mod width={better} 1e09 (1, 2)" in out
    )


def test_a_sweep_without_a_budget_warns_of_unequal_flops(tmp_path, capsys, configs):
    arguments = ["--config", *configs, "--output", tmp_path / "out", "--flops_per_second", "1e9", "--plan"]
    dense, mod = run_tool(sweep, capsys, *arguments)["members"]
    assert dense["plan"]["flops"] > 1.05 * mod["plan"]["flops"]
    sweep.main([*map(str, arguments)])
    error = capsys.readouterr().err
    assert f"from {mod['plan']['flops']:.3e} (mod-seed0) to {dense['plan']['flops']:.3e} (dense-seed0)" in error
    sweep.main([*map(str, arguments), "--flops", "1e9"])
    assert "differ in training FLOPs" not in capsys.readouterr().err
    for rest in (["--command", STAND_IN], ["--report"]):
        (warning,) = run_tool(sweep, capsys, *arguments[:-1], *rest)["warnings"]
        assert "their losses are not at equal compute" in warning


def test_a_fit_stands_beside_a_fit_and_a_member_beside_a_member():
    fitted = curve({"2x64": (1e5, 3.1), "3x64": (2e5, 3.02), "4x64": (4e5, 3.1), "5x64": (8e5, 3.32)})
    edge = curve({"2x64": (1e5, 3.0), "3x64": (1.2e5, 3.001), "4x64": (4e5, 3.3)})
    assert fitted.optimum is not None and edge.optimum is None
    beside_edge, beside_itself = optima.to_dict(fitted, edge), optima.to_dict(fitted, fitted)
    assert beside_edge["optimum"]["relative_loss"] is None and beside_edge["optimum"]["relative_flops"] is None
    assert beside_edge["best"]["relative_loss"] == pytest.approx(3.02 / 3.0 - 1)
    assert beside_edge["best"]["relative_flops"] == pytest.approx(2.0)
    assert beside_itself["optimum"]["relative_loss"] == beside_itself["best"]["relative_loss"] == 0
    assert optima.to_dict(edge, fitted)["cheapest_as_good_as_baseline"]["relative_loss"] == pytest.approx(
        3.0 / 3.02 - 1
    )
