"""`tools/sweep.py` and `tools/isoflop.py`: plans, fits, members that fail, stop and resume, and what is reported."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mode import accounting
from mode.config_file import load_run_config
from mode.section import ConfigError
from tests import closed_form_train as closed_form
from tests import launch

sys.path.append(str(launch.ROOT / "tools"))  # as when the tools are run as scripts
from tools import isoflop, plan, sweep  # noqa: E402
from tools.experiments.fitting import between, fit  # noqa: E402
from tools.experiments.members import parse_size, parse_vary, plan_members, resize, short_names  # noqa: E402

CONFIGS = launch.ROOT / "ds_configs"
STAND_IN = f"{sys.executable} -m tests.closed_form_train {{config}} {{output_dir}}"
SIZES = ("1x32", "2x32", "2x48", "3x64", "4x64")


def write_config(folder: Path, name: str, depth: bool) -> Path:
    """A tiny configuration without experts."""
    document = json.loads(json.dumps(launch.TINY))
    document["mode"] |= {"experts": None, "depth": launch.TINY["mode"]["depth"] if depth else None}
    document["mode"]["depth"] = {**document["mode"]["depth"], "every": 1} if depth else None
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def configs(tmp_path, monkeypatch) -> list[Path]:
    """dense.json and mod.json; the stand-in is found."""
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    monkeypatch.chdir(launch.ROOT)
    return [write_config(tmp_path, "dense", False), write_config(tmp_path, "mod", True)]


def run_tool(tool: Any, capsys, *arguments: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert tool.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def refused(tool: Any, capsys, *arguments: Any) -> str:
    assert tool.main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


# ---------------------------------------------------------------------------------------------------
# Plans


def test_the_plan_has_the_figures_of_the_plan_tool_and_the_length_of_the_budget():
    file = str(CONFIGS / "mode.json")
    vary = [parse_vary("mode.depth.capacity_fraction=0.125,0.5"), parse_vary("mode.depth.every=1,2")]
    members = plan_members([file], vary=vary, budgets=[1e12], seeds=[3, 4])
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
    assert isoflop.main([*map(str, options), "--budgets", "1e3", "1e12", str(20 * step)]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1, "one for both seeds, and none for budgets of many steps"
    assert warnings[0].startswith("warning: dense-2x32-1000-seed0: mode.train.flops is 1000; a step takes")


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


# ---------------------------------------------------------------------------------------------------
# The tools, on runs with closed-form losses


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
    assert mod["relative_to"] == "dense's optimum"
    good = [flops for parameters, flops, loss in family["mod"] if loss <= closed_form.FLOOR]
    cheapest = mod["cheapest_as_good_as_baseline"]
    assert len(good) > 0 and cheapest["flops_per_token"] == pytest.approx(min(good))
    best = min(family["mod"], key=lambda item: item[2])
    assert mod["best"]["parameters"] == best[0] and mod["best"]["loss"] == pytest.approx(best[2] + closed_form.PER_SEED)
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
    assert mod["relative_to"] == f"dense's best member, {dense['best']['size']}"
    two = run_tool(isoflop, capsys, *base, "--sizes", "1x32", "1x48", "--report")
    assert two["isoflop"][0]["fit"] is None and two["isoflop"][0]["problem"].startswith("2 finished of the 3 sizes")


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
    planned = run_tool(sweep, capsys, *arguments, "--flops", "2e9", "--plan")
    assert {member["state"] for member in planned["members"]} == {"not started"}  # another budget, another directory


def test_a_failing_member_is_reported_and_the_others_go_on(tmp_path, capsys, configs):
    output = tmp_path / "out"
    arguments = ["--config", configs[0], "--output", output, "--command", STAND_IN]
    found = run_tool(sweep, capsys, *arguments, "--vary", "mode.train.eval_sequences=13,14,15", code=1)
    halfway, refused_member, good = found["members"]
    assert halfway["state"] == "failed" and "exit code 1: RuntimeError: this stand-in fails" in halfway["problem"]
    assert refused_member["problem"].startswith("exit code 2: error: mode.train.eval_sequences: is 14")
    assert str(output / "logs" / f"{refused_member['name']}.log") in refused_member["problem"]
    assert good["state"] == "finished" and [point["seeds"] for point in found["points"]] == [[0]]
    report = run_tool(sweep, capsys, *arguments, "--vary", "mode.train.eval_sequences=13,14,15", "--report")
    assert [member["state"] for member in report["members"]] == ["unfinished", "not started", "finished"]
    assert report["members"][0]["problem"] == "at step 6 of 12: stopped early or still running"


def test_after_a_signal_no_other_member_is_started_even_if_the_one_running_ends_well(tmp_path, capsys, configs):
    """The stand-in's parent, this process, gets the signal while the first member runs, and the member ignores it."""
    script = tmp_path / "member.sh"
    script.write_text(f'trap "" INT\n{sys.executable} -m tests.closed_form_train "$1" "$2" && kill -INT $PPID\n')
    command = f"sh {script} {{config}} {{output_dir}}"
    found = run_tool(sweep, capsys, "--config", *configs, "--output", tmp_path / "out", "--command", command, code=75)
    assert [member["state"] for member in found["members"]] == ["finished", "not started"]


def test_members_side_by_side_share_the_cores_and_each_gets_the_signal(tmp_path, capsys, configs, monkeypatch):
    """Each waits until its pair has begun, so that one at a time would never end; the second pair stops the tool."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "member.sh"
    script.write_text(
        f"cd {tmp_path}; touch begun.$(basename $1); echo threads $OMP_NUM_THREADS\n"
        "await() { until [ $(ls begun.* | wc -l) -ge $1 ]; do sleep 0.05; done; }\n"
        "case $1 in *seed[01].json) await 2;; *) await 4; kill -TERM $PPID; exec sleep 60;; esac\n"
        f"exec {sys.executable} -m tests.closed_form_train $1 $2\n"
    )
    arguments = ["--config", configs[0], "--output", tmp_path / "out", "--jobs", "2", "--seeds", 0, 1, 2, 3, 4]
    found = run_tool(sweep, capsys, *arguments, "--command", f"sh {script} {{config}} {{output_dir}}", code=75)
    assert [member["state"] for member in found["members"]] == ["finished"] * 2 + ["interrupted"] * 2 + ["not started"]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {path.read_text() for path in (tmp_path / "out" / "logs").iterdir()} == {f"threads {share}\n"}


def test_members_that_a_command_only_queues_are_handed_over(tmp_path, capsys, configs):
    arguments = ["--config", *configs, "--output", tmp_path / "out", "--command", "true {config} {output_dir}"]
    found = run_tool(sweep, capsys, *arguments)
    assert [member["state"] for member in found["members"]] == ["handed over", "handed over"]
    assert found["points"] == [] and found["plot"] is None
    assert load_run_config(tmp_path / "out" / "configs" / "mod-seed0.json") == load_run_config(configs[1])
    missing = ["--command", "no_such_program {config} {output_dir}"]
    found = run_tool(sweep, capsys, *arguments[:-2], *missing, code=1)
    assert "no_such_program cannot be started" in found["members"][0]["problem"]


def test_directories_that_hold_no_finished_run_of_the_plan(tmp_path, capsys, configs):
    output = tmp_path / "out"
    arguments = ["--config", configs[0], "--output", output, "--command", STAND_IN]
    run_tool(sweep, capsys, *arguments, "--seeds", 0, 1, 2)
    for path in (output / "dense-seed0").iterdir():
        path.unlink()
    (output / "dense-seed1" / "metrics.jsonl").unlink()
    report = run_tool(sweep, capsys, *arguments, "--seeds", 0, 1, 2, "--report")
    empty, half, whole = report["members"]
    assert empty["state"] == half["state"] == "unfinished" and whole["state"] == "finished"
    assert "is empty" in empty["problem"] and "has no metrics.jsonl" in half["problem"]
    assert run_tool(sweep, capsys, *arguments, "--seeds", 0, 1, 2)["points"][0]["seeds"] == [0, 1, 2]  # made good
    message = refused(sweep, capsys, *arguments, "--seeds", 2, "--set", "mode.train.steps=13")
    assert "dense-seed2: mode.train.steps was 12 in the run that is there and is 13 now; set it back" in message
    harmless = ["--set", "mode.train.save_every=50", "--set", "mode.description=another"]
    assert run_tool(sweep, capsys, *arguments, "--seeds", 2, *harmless)["members"][0]["state"] == "finished"
    config = output / "dense-seed2" / "config.json"
    document = json.loads(config.read_text())
    document["mode"]["model"]["number_of_layers"] = document["mode"]["model"].pop("num_layers")
    config.write_text(json.dumps(document))
    message = refused(sweep, capsys, *arguments, "--seeds", 2, "--report")
    assert "config.json does not fit this version of mode" in message and "number_of_layers" in message


@pytest.mark.parametrize("tool", ["sweep", "isoflop"])
def test_help_is_quick_to_come(tool):
    command = [sys.executable, "-X", "importtime", str(launch.ROOT / "tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--vary" in done.stdout
    assert not {"numpy", "torch", "matplotlib"} & {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


# ---------------------------------------------------------------------------------------------------
# A real sweep


def test_a_real_sweep_is_interrupted_and_resumed_past_a_member_that_fails(tmp_path, capsys):
    config = launch.write_tiny(tmp_path)
    output = tmp_path / "out"
    arguments = ["--config", config, "--output", output, "--set", "mode.train.steps=150"]
    arguments += ["--vary", "zero_optimization.round_robin_gradients=false,true"]  # train.py refuses the second
    first = output / "tiny-round_robin_gradients=false-seed0"
    command = [sys.executable, str(launch.ROOT / "tools" / "sweep.py"), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=launch.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (first / "metrics.jsonl").is_file() or len(launch.metrics(first)) < 6:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "it can be resumed" in out and "the same command goes on from here" in errors
    stopped = launch.metrics(first)[-1]["step"]
    assert 6 <= stopped < 150
    assert not (output / "tiny-round_robin_gradients=true-seed0").exists()

    found = run_tool(sweep, capsys, *arguments, code=1)
    assert f"at step {stopped}\n" in (output / "logs" / f"{first.name}.log").read_text().split("resuming from")[1]
    done, failed = found["members"]
    assert done["state"] == "finished" and failed["state"] == "failed"
    assert failed["problem"].startswith("exit code 2: error: zero_optimization.round_robin_gradients: is true")
    last = launch.metrics(first)[-1]
    assert last["step"] == 150 and last["loss/val_causal"] != last["loss/val"]
    assert found["points"][0]["loss"]["mean"] == last["loss/val_causal"]
    assert found["points"][0]["plan"]["tokens"] == last["tokens"]

    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    shutil.rmtree(output / "configs")
    report = run_tool(sweep, capsys, *arguments, "--report")
    assert report["points"] == found["points"]
    assert before == {path: path.stat().st_mtime_ns for path in first.rglob("*")}

    (first / "metrics.jsonl").write_text("")  # its checkpoint is at the end, so there is nothing left to log
    lost, _ = run_tool(sweep, capsys, *arguments, code=1)["members"]
    assert lost["state"] == "failed" and f"delete {first} to run it again" in lost["problem"]
