"""What all tools share: `--set`, and one exit code for one kind of error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mode import tooling
from mode.training.safety import stops

ROOT = Path(__file__).parent.parent
MODE, MOE = "ds_configs/mode.json", "ds_configs/moe.json"


def run_tool(name: str, *arguments: str | Path, output: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, name, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(output or os.devnull, "w") as file:
        stdout = file if output else subprocess.PIPE
        return subprocess.run(
            command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=120
        )


def test_tools_exit_as_train_does() -> None:
    assert (tooling.EXIT_BAD_INPUT, tooling.EXIT_IO) == (stops.EXIT_BAD_INPUT, stops.EXIT_SAVE_FAILED)


def takes_a_configuration(tmp_path: Path) -> dict[str, list[str]]:
    """Every command that takes a configuration file, with what it needs to print something of it."""
    shared = ["--config", MODE, "--output", str(tmp_path / "members"), "--plan"]
    return {
        "tools/plan.py": [MODE],
        "tools/sweep.py": shared,
        "tools/isoflop.py": [*shared, "--budgets", "1e12", "--sizes", "2x64"],
        "train.py": ["--deepspeed_config", MODE, "--dry_run"],
    }


TAKES_A_CONFIGURATION = sorted(takes_a_configuration(Path()))


@pytest.mark.parametrize("tool", TAKES_A_CONFIGURATION)
def test_every_tool_that_takes_a_configuration_takes_set_and_refuses_what_nobody_reads(
    tool: str, tmp_path: Path
) -> None:
    done = run_tool(tool, *takes_a_configuration(tmp_path)[tool], "--set", "steps=20")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {MODE}: steps: unknown key") and '"mode.train.steps"?' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("tool", ["tools/plan.py", "tools/sweep.py"])
def test_a_full_disk_is_exit_code_4_and_one_line(tool: str, tmp_path: Path) -> None:
    speed = ["--flops_per_second", "1e10"] if tool == "tools/sweep.py" else []  # else it would measure first
    done = run_tool(tool, *takes_a_configuration(tmp_path)[tool], *speed, output="/dev/full")
    assert (done.returncode, done.stderr) == (
        4,
        "error: reading or writing failed: [Errno 28] No space left on device\n",
    )


def test_a_report_that_cannot_be_written_is_exit_code_4_in_every_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unwritable() -> int:
        (tmp_path / "missing" / "report.md").write_text("")
        return 0

    assert tooling.exit_code(unwritable) == 4
    assert tooling.print_figures(lambda: {"written": unwritable()}, str, as_json=True) == 4
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("error: reading or writing failed: [Errno 2]") == 2


def test_a_plan_is_of_the_file_with_its_settings() -> None:
    done = run_tool("tools/plan.py", MODE, "--compare", MOE, "--set", "mode.train.steps=20", "--json")
    assert done.returncode == 0
    plans = json.loads(done.stdout)
    assert [plans[name]["run"]["steps"] for name in ("plan", "compare")] == [20, 20]
