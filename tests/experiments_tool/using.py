"""`tools/sweep.py` and `tools/isoflop.py`, called as their users call them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests import launch

sys.path.append(str(launch.ROOT / "tools"))  # as when the tools are run as scripts
from experiments import optima as optima  # noqa: E402

from tools import isoflop as isoflop  # noqa: E402
from tools import sweep as sweep  # noqa: E402

STAND_IN = f"{sys.executable} -m tests.closed_form_train {{config}} {{output_dir}}"


def run_tool(tool: Any, capsys, *arguments: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert tool.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def refused(tool: Any, capsys, *arguments: Any) -> str:
    assert tool.main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error
