"""Members that fail, stop, wait, run side by side and are resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mode.config.file import load_run_config
from tests import launch
from tests.experiments_tool.using import STAND_IN, refused, run_tool, sweep


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
    log = output / "logs" / f"{halfway['name']}.log"
    assert report["members"][0]["problem"] == (
        "at step 6 of 12: stopped early or still running; "
        f"its log ends with: RuntimeError: this stand-in fails (log: {log})"
    )


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
