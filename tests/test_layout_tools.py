"""tools/parity.py and tools/benchmark.py dispatch as a user runs them, at a small size: real ranks, real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def figures(*arguments: str) -> tuple[int, dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=400)
    assert "{" in done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout[done.stdout.index("{\n") :])


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_the_layout_does_not_change_the_result(precision: str) -> None:
    """12 layouts on 4 ranks, in which every EP size meets every ZeRO stage, against one process."""
    code, found = figures("tools/parity.py", "--quick", "--steps", "5", "--precision", precision)
    assert {(case["ep_size"], case["zero_stage"]) for case in found["cases"]} == {
        (ep_size, stage) for ep_size in (1, 2, 4) for stage in (0, 1, 2, 3)
    }
    for case in found["cases"]:
        for name, limit in found["wanted"].items():
            assert case[name] <= limit, case
        assert case["same_dtypes"], case
    assert found["dtypes"] == (["float32"] if precision == "fp32" else ["bfloat16", "float32"])
    assert code == 0
    if precision == "fp32":
        assert found["wanted"] == {"loss": 1e-6, "grad_norm": 1e-5, "weights": 1e-5}


def test_bytes_sent_equal_the_accounting_and_are_less_than_deepspeeds_own() -> None:
    code, found = figures(
        *("tools/benchmark.py", "dispatch", "--ranks", "2", "--tokens", "96", "--width", "16", "--hidden", "16"),
        *("--top_k", "2", "--repeats", "2"),
    )
    rows = found["dispatch"]
    assert code == 0 and [row["no_op_share"] for row in rows] == pytest.approx([0.0, 0.25, 0.5, 0.75], abs=0.01)
    for row in rows:
        real = 2 * 96 * 2 * (1 - row["no_op_share"])  # ranks x tokens x choices
        assert row["bytes"] == row["accounting"] == pytest.approx(4 * real * 16 * 4)  # all-to-alls x width x float32
        assert row["bytes"] < row["native_bytes"]
