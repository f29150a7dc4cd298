"""What members are planned, and what the fits make of their losses."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from mode import accounting
from mode.config.file import load_run_config
from mode.config.section import ConfigError
from tests import launch
from tests.experiments_tool.using import STAND_IN, isoflop, refused, run_tool, sweep
from tools import plan
from tools.experiments.fitting import between, fit
from tools.experiments.members import parse_size, parse_vary, plan_members, resize, short_names

CONFIGS = launch.ROOT / "ds_configs"


def test_the_plan_has_the_figures_of_the_plan_tool_and_the_length_of_the_budget():
    file = str(CONFIGS / "mode.json")
    vary = [parse_vary("mode.depth.capacity_fraction=0.125,0.5"), parse_vary("mode.depth.every=1,2")]
    members = plan_members([file], vary=vary, settings=["mode.depth.warmup_fraction=0"], budgets=[1e12], seeds=[3, 4])
    assert len(members) == 8 and len({member.name for member in members}) == 8
    for member in members:
        assert (member.run.mode.depth.capacity_fraction, member.run.mode.depth.every) == tuple(member.varied.values())
        assert member.run.mode.seed == member.seed and member.run.mode.train.flops == 1e12
        figures = plan.make_plan(file, member.run, 1, None)
        assert member.cost.parameters == figures["parameters"]["total"]
        assert member.cost.active_parameters == figures["parameters"]["active_per_token"]
        assert round(member.cost.flops_per_token) == figures["flops"]["forward_per_token"]
        assert member.cost.steps == round(1e12 / figures["flops"]["training_per_step"])
        assert member.cost.tokens == member.cost.steps * 8 * 256
    first = members[0]
    assert first.name == "mode-capacity_fraction=0.125-every=1-1e12-seed3"
    assert first.cost.flops_per_token < members[2].cost.flops_per_token  # every other block costs more than every one


def test_a_plan_warns_of_budgets_that_whole_steps_miss(tmp_path, capsys, configs):
    step = accounting.step_flops(load_run_config(configs[0]), 1)
    options = ["--config", configs[0], "--output", tmp_path / "runs", "--sizes", "2x32", "--seeds", 0, 1, "--plan"]
    options += ["--flops_per_second", "1e9"]
    assert isoflop.main([*map(str, options), "--budgets", "1e3", "1e12", str(20 * step)]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1, "one for both seeds, and none for budgets of many steps"
    assert warnings[0].startswith("warning: dense-2x32-1000-seed0: mode.train.flops is 1000; a step takes")


def test_a_plan_estimates_time_and_says_from_what(tmp_path, capsys, configs):
    plan = ["--config", *configs, "--output", tmp_path / "out", "--flops", "1e9", "--plan"]
    given = run_tool(sweep, capsys, *plan, "--flops_per_second", "2e6", "--jobs", 2)
    seconds = [member["plan"]["flops"] / 2e6 for member in given["members"]]
    assert [member["seconds"] for member in given["members"]] == pytest.approx(seconds)
    assert all(member["estimated"] for member in given["members"])
    assert given["seconds_left"] == pytest.approx(max(seconds)), "two at a time end with the longer one"
    assert sweep.main([*map(str, plan), "--flops_per_second", "2e6"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(" min not started") == 2
    assert "estimated from 2e+06 FLOP/s, given by --flops_per_second" in shown
    assert "in all about 16.67 min to go, 1 at a time" in shown

    measured = run_tool(sweep, capsys, *plan)  # real steps on this machine
    assert measured["source"].startswith("measured now by some steps of dense-1e09-seed0 on random tokens")
    assert measured["flops_per_second"] > 0 and measured["seconds_left"] == pytest.approx(
        sum(member["seconds"] for member in measured["members"])
    )
    assert not (tmp_path / "out").exists(), "a plan writes nothing"

    elsewhere = run_tool(sweep, capsys, *plan, "--command", STAND_IN)
    assert elsewhere["flops_per_second"] is None and "give --flops_per_second" in elsewhere["source"]
    run_tool(sweep, capsys, *plan[:-1], "--command", STAND_IN, "--seeds", 0)
    logged = run_tool(sweep, capsys, *plan, "--seeds", 0, 1)
    assert logged["source"] == "the median of the 2 members that have logged steps"
    done = [member for member in logged["members"] if not member["estimated"]]
    assert [member["seconds"] for member in done] == [member["plan"]["steps"] * 0.5 for member in done] and len(
        done
    ) == 2


def test_a_size_keeps_heads_and_the_shares_of_the_inner_widths():
    document = flagship_of_width_128()
    resize(document, parse_size("12x192,optimizer.params.lr=0.002"))
    model = document["mode"]["model"]
    assert [model[name] for name in ("num_layers", "width", "num_heads", "num_kv_heads")] == [12, 192, 6, 3]
    assert model["ffn_width"] == document["mode"]["experts"]["width"] == 352 * 192 // 128
    assert document["optimizer"]["params"]["lr"] == 0.002
    odd = flagship_of_width_128()
    resize(odd, parse_size("1x160"))
    assert odd["mode"]["model"]["num_heads"] == 5 and odd["mode"]["model"]["num_kv_heads"] == 1  # 2.5 divides nothing
    with pytest.raises(ConfigError, match="no multiple of the 32 of a head"):
        resize(flagship_of_width_128(), parse_size("4x100"))


def flagship_of_width_128() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CONFIGS / "mode.json").read_text())
    document["mode"]["model"] |= {"width": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_width": 352}
    document["mode"]["experts"]["width"] = 352
    return document


def test_every_shipped_configuration_can_be_resized():
    files = sorted(map(str, CONFIGS.glob("*.json")))
    members = plan_members(files, sizes=[parse_size("2x32"), parse_size("6x224")], budgets=[1e12])
    assert len(members) == 2 * len(files) >= 16
    for member in members:
        width = member.run.mode.model.width
        assert member.run.mode.model.head_width == 16 and member.run.mode.model.ffn_width == round(2.75 * width)


def test_values_are_json_or_text_and_may_hold_commas():
    assert parse_vary("mod,mode:mode.depth.gate=raw,sigmoid").configs == ("mod", "mode")
    assert parse_vary("a.b=raw,0.5,null").values == ("raw", 0.5, None)
    assert parse_vary('a.b=null,{"width": 8, "weight": 0.1}').values == (None, {"width": 8, "weight": 0.1})
    assert short_names(["a.b.weight", "a.c.weight", "a.every"]) == {
        "a.b.weight": "b.weight",
        "a.c.weight": "c.weight",
        "a.every": "every",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "a section that is null": (["--vary", "mode.depth.every=1,2"], "not apply to dense, whose mode.depth is null"),
        "an unknown file": (["--vary", "moe:mode.depth.every=1"], "no --config is called moe; known: dense, mod"),
        "no values": (["--vary", "mode.depth.every"], "must look like mode.depth.every=1,2"),
        "a value twice": (["--vary", "mod:mode.depth.every=1,1"], "names a value twice"),
        "a wrong value": (["--vary", "mod:mode.depth.gate=rwa"], 'mod-gate=rwa: mode.depth.gate: is "rwa"'),
        "a seed besides --seeds": (["--vary", "mode.seed=3,5", "--seeds", "0"], "mode.seed is set by --seeds"),
        "a length besides --flops": (["--vary", "mode.train.steps=3,5", "--flops", "1e9"], "is set by the budget"),
        "a seed twice": (["--seeds", "1", "1"], "two members called dense-seed1"),
        "a command without places": (["--command", "true"], "--command: is \"true\"; it must name {config}"),
        "a picture": (["--plot", "a.gif"], "--plot: is a.gif; it must end in .png"),
        "nothing to report": (["--report"], "is no directory; --report needs"),
    }.values(),
)  # fmt: skip
def test_wrong_usage_is_one_line_and_starts_nothing(tmp_path, capsys, configs, arguments, message):
    output = tmp_path / "out"
    assert message in refused(sweep, capsys, "--config", *configs, "--output", output, *arguments)
    assert not output.exists()


# ---------------------------------------------------------------------------------------------------
# Fits


def test_a_fit_recovers_a_parabola_and_its_lowest_point():
    sizes = [1e6, 2e6, 3e6, 7e6, 2e7]
    found = fit(sizes, [2.5 + 0.07 * math.log(x / 4.2e6) ** 2 for x in sizes])
    assert found.lowest == pytest.approx(4.2e6, rel=1e-9)
    assert found.at(4.2e6) == pytest.approx(2.5, rel=1e-12) and found.c == pytest.approx(0.07, rel=1e-9)
    assert found.rms < 1e-12 and found.problem is None


def test_a_fit_is_the_least_squares_one_when_seeds_scatter():
    x = [1e6, 1e6, 3e6, 3e6, 9e6, 9e6, 2e7]
    losses = [3.1, 3.0, 2.8, 2.9, 2.7, 2.75, 2.95]
    logs = np.log(x)
    design = np.stack([np.ones(7), logs, logs**2], axis=1)
    a, b, c = np.linalg.lstsq(design, np.array(losses), rcond=None)[0]
    found = fit(x, losses)
    assert found.lowest == pytest.approx(math.exp(-b / (2 * c)), rel=1e-6)
    assert found.at(5e6) == pytest.approx(a + b * math.log(5e6) + c * math.log(5e6) ** 2, rel=1e-9)
    assert found.rms == pytest.approx(math.sqrt(np.mean((design @ [a, b, c] - losses) ** 2)), rel=1e-6)


def test_an_optimum_outside_the_family_is_none():
    sizes = [1e6, 2e6, 4e6]
    below = fit(sizes, [2 + 0.1 * math.log(x / 5e5) ** 2 for x in sizes])
    above = fit(sizes, [2 + 0.1 * math.log(x / 5e6) ** 2 for x in sizes])
    hill = fit(sizes, [2 - 0.1 * math.log(x / 2e6) ** 2 - 0.01 * math.log(x) for x in sizes])
    assert below.lowest is above.lowest is hill.lowest is None
    assert below.problem.startswith("at the edge of the family: no optimum found") and "below it" in below.problem
    assert "add sizes above it" in above.problem and "bends down" in hill.problem
    assert fit([1e6, 2e6, 2e6], [3, 2, 2.5]) is None  # two sizes


def test_costs_are_interpolated_in_logarithms():
    assert between(3e6, [9e6, 1e6], [2.7e7, 1e6]) == pytest.approx(math.sqrt(2.7e7 * 1e6))
    assert between(3e6, [1e6, 3e6, 9e6], [1.0, 5.0, 7.0]) == pytest.approx(5.0)
