"""RESULTS.md tells what was measured: its tables are those that the tools make of the records in docs/results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mode.runs import find_runs, read_run
from tests.experiments_tool.using import isoflop, run_tool, sweep

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(folder for folder in (ROOT / "docs" / "results").iterdir() if folder.is_dir())
RECORDS = [run for folder in FOLDERS for run in find_runs(folder)]
RESULTS = (ROOT / "RESULTS.md").read_text()
TOOLS = {"tools/isoflop.py": isoflop, "tools/sweep.py": sweep}


def report_commands() -> list[str]:
    """The lines of RESULTS.md that report on the records."""
    code = "\n".join(re.findall(r"^```\n(.*?)^```", RESULTS, flags=re.MULTILINE | re.DOTALL))
    lines = code.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if "--report" in line]


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_every_record_is_of_a_finished_run(folder):
    run = read_run(folder)
    assert run.finished
    assert run.last["flops"] == pytest.approx(run.config.train.flops, rel=0.02)


@pytest.fixture
def report(capsys, tmp_path, monkeypatch):
    """What the tool of a report command finds."""
    monkeypatch.chdir(ROOT)

    def run(command: str) -> dict[str, Any]:
        python, tool, *arguments = shlex.split(command)
        assert python == "python"
        return run_tool(TOOLS[tool], capsys, *arguments, "--plot", tmp_path / "picture.png")

    return run


@pytest.mark.parametrize("command", report_commands())
def test_the_figures_of_a_report_stand_in_the_text(command, report):
    points = report(command)["points"]
    assert points
    for point in points:
        name = " | ".join(filter(None, (point["label"], point["size"])))
        row = rf"^\| {re.escape(name)} \| .*\b{point['loss']['mean']:.4f}\b"
        assert re.search(row, RESULTS, flags=re.MULTILINE), (name, point["loss"])


def test_there_is_such_a_report_of_every_record(report):
    reported = set()
    for command in report_commands():
        arguments = shlex.split(command)
        folder = ROOT / arguments[arguments.index("--output") + 1]
        members = report(command)["members"]
        reported |= {folder / member["name"] for member in members if member["state"] == "finished"}
    assert reported == set(RECORDS)
