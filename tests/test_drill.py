"""More than one node: the drill of two hosts, the Slurm script, and the commands of docs/multinode.md."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from deepspeed.launcher import runner

import train
from mode.training.safety import shared_directory as shared
from tests import launch

DRILL = [sys.executable, str(launch.ROOT / "tools" / "drill.py"), "--json"]
SBATCH = launch.ROOT / "docs" / "slurm.sbatch"
PAGE = launch.ROOT / "docs" / "multinode.md"

# Stand-ins: two "nodes" that are this machine, and srun's rule for the exit code.
SCONTROL = """#!/bin/bash
case $1 in
show) printf '127.0.0.1\\nlocalhost\\n' ;;
requeue) echo "$2" >"$STATE/requeued" ;;
esac
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" >"$STATE/tasks"
worst=0
for task in "${tasks[@]}"; do
    wait "$task"
    code=$?
    ((code > worst)) && worst=$code
done
exit $worst
"""


def test_two_hosts_that_divide_the_experts_train_to_the_losses_of_one_and_talk_over_the_link():
    done = subprocess.run([*DRILL, "--steps", "6"], capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(done.stdout)
    if done.returncode == 77:
        pytest.skip(report["skipped"])
    assert done.returncode == 0, report["failed"] or report
    assert report["ep_size"] == 2 and len(report["losses_two_hosts"]) == 6
    assert report["losses_two_hosts"] == pytest.approx(report["losses_one_host"], rel=1e-6)
    assert report["losses_two_hosts"][-1] < report["losses_two_hosts"][0]
    assert min(report["bytes_sent"]) > 100_000, "an idle link carries some hundred bytes"
    assert "drill-" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_without_ip_the_drill_says_so_and_exits_with_77(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(DRILL, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77
    assert "iproute2" in json.loads(done.stdout)["skipped"]


def enter_own_folder(folders: str) -> None:
    os.chdir(f"{folders}/{os.environ['RANK']}")
    shared.PATIENCE = 0.5


def test_nodes_that_do_not_share_the_run_directory_are_refused(tmp_path):
    config = launch.write_tiny(tmp_path)
    for rank in range(2):
        (tmp_path / str(rank) / "run").mkdir(parents=True)
    before = functools.partial(enter_own_folder, str(tmp_path))
    job = launch.start(["--deepspeed_config", str(config), "--output_dir", "run"], tmp_path / "log", 2, before)
    assert job.wait() == [2, 2]
    assert "--output_dir" in job.output() and "ranks [1] do not see" in job.output()
    assert [path.name for path in (tmp_path / "0" / "run").iterdir()] == [".lock"]


def stand_in(folder: Path) -> dict[str, str]:
    """An environment in which the Slurm script finds two nodes of one CPU rank."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "deepspeed").write_text(f'#!/bin/bash\nexec {sys.executable} -m deepspeed.launcher.runner "$@"\n')
    (tools / "deepspeed").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "STATE": str(folder),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLOTS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@pytest.mark.skipif(shutil.which("pkill") is None, reason="the Slurm script needs pkill and pgrep (package procps)")
def test_the_slurm_script_turns_its_signal_into_a_checkpoint_and_a_requeue(tmp_path):
    config, run_dir = launch.write_tiny(tmp_path), tmp_path / "run"
    arguments = ["--deepspeed_config", config, "--output_dir", run_dir, "--set", "mode.train.steps=100000"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            ["bash", SBATCH, *arguments, "--set", "mode.train.save_every=100000"],
            cwd=launch.ROOT,
            env=stand_in(tmp_path),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "metrics.jsonl").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        # Slurm may signal the tasks alone or all their processes, as it is configured: here the harder case.
        for task in map(int, (tmp_path / "tasks").read_text().split()):
            tree = psutil.Process(task)
            for process in [tree, *tree.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR1)
        code = job.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert code == 75, (tmp_path / "log").read_text()
    assert (tmp_path / "requeued").read_text().strip() == str(os.getpid())
    step = launch.metrics(run_dir)[-1]["step"]
    assert (run_dir / "checkpoints" / "latest").read_text() == f"step_{step:08d}"
    assert not list(launch.ROOT.glob(f"hostfile.{os.getpid()}"))


def known_flags(capsys: pytest.CaptureFixture[str]) -> tuple[set[str], set[str]]:
    """The launcher's and train.py's, from their own help."""
    flags = []
    for parse in (runner.parse_args, train.parse_arguments):
        with pytest.raises(SystemExit):
            parse(["--help"])
        flags.append(set(re.findall(r"--\w+", capsys.readouterr().out)))
    return flags[0], flags[1]


@pytest.mark.parametrize("path", [SBATCH, PAGE], ids=lambda path: path.name)
def test_every_launch_command_names_only_flags_that_exist(path, capsys):
    of_launcher, of_train = known_flags(capsys)
    text = path.read_text().replace("\\\n", " ")
    commands = re.findall(r"^(?!#).*\bdeepspeed (--.*?)\btrain\.py(.*)$", text, flags=re.MULTILINE)
    assert commands
    for launcher_part, train_part in commands:
        assert set(re.findall(r"--\w+", launcher_part)) <= of_launcher
        assert set(re.findall(r"--\w+", train_part)) <= of_train


def test_the_slurm_script_is_valid_bash():
    done = subprocess.run(["bash", "-n", SBATCH], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
