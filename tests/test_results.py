"""RESULTS.md tells what was measured: its tables are those that the tools make of the records in docs/results."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mode.runs import find_runs, read_run
from tests.experiments_tool.using import isoflop, run_tool

ROOT = Path(__file__).parent.parent
RECORDS = [run for text in ("stdlib", "packages") for run in find_runs(ROOT / "docs" / "results" / text)]
RESULTS = (ROOT / "RESULTS.md").read_text()


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


@pytest.mark.parametrize("command", report_commands())
def test_the_figures_of_a_report_stand_in_the_text(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    python, tool, *arguments = shlex.split(command)
    assert (python, tool) == ("python", "tools/isoflop.py")
    found = run_tool(isoflop, capsys, *arguments, "--plot", tmp_path / "picture.png")
    assert found["points"]
    for point in found["points"]:
        row = rf"^\| {point['label']} \| {point['size']} \| .*\b{point['loss']['mean']:.4f}\b"
        assert re.search(row, RESULTS, flags=re.MULTILINE), (point["label"], point["size"], point["loss"])


def test_there_is_such_a_report_of_every_record(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    reported = set()
    for command in report_commands():
        arguments = shlex.split(command)[2:]
        found = run_tool(isoflop, capsys, *arguments, "--plot", tmp_path / "picture.png")
        folder = ROOT / arguments[arguments.index("--output") + 1]
        reported |= {folder / member["name"] for member in found["members"] if member["state"] == "finished"}
    assert reported == set(RECORDS)
