"""Run directories with closed-form curves, and `tools/compare.py` on them."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import launch

sys.path.append(str(launch.ROOT / "tools"))  # as when the tool is run as a script
from tools import compare  # noqa: E402

TOKENS = 128  # per step: train_batch_size 4 x sequence_length 32


def settings(**changes: Any) -> dict[str, Any]:
    """A whole configuration without depth routing; `changes` by dotted path, with __ for the dots."""
    document = copy.deepcopy(launch.TINY)
    document["mode"]["depth"] = None
    document["mode"]["train"] |= {"steps": 100, "log_every": 5, "eval_every": 10}
    for path, value in changes.items():
        *parents, name = path.split("__")
        here = document
        for parent in parents:
            here = here[parent]
        here[name] = value
    return document


def write_run(
    folder: Path,
    loss: Callable[[float], float],
    *,
    steps: int = 100,
    flops: int = 10**9,
    seconds: float = 0.5,
    causal: Callable[[float], float] | None = None,
    corpus: dict[str, int] | None = None,
    **changes: Any,
) -> Path:
    """`loss` of the training FLOPs; `flops` and `seconds` per step; logged every 5 steps and evaluated every 10."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings(**changes)))
    rows = []
    for step in range(5, steps + 1, 5):
        done = flops * step
        row = {"step": step, "tokens": TOKENS * step, "flops": done, "loss/train": loss(done) + 0.1}
        row |= {"perf/step_seconds": seconds, "perf/tokens_per_second": TOKENS / seconds}
        row |= {"perf/peak_memory_bytes": 2**30 + step, "experts/no_op_share": step / 100, "experts/dropped_share": 0.0}
        if step % 10 == 0:
            row["loss/val"] = loss(done)
            if causal is not None:
                row["loss/val_causal"] = causal(done)
        rows.append(row)
    write_rows(folder, rows)
    if corpus is not None:
        checkpoint = folder / "checkpoints" / "step_00000100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"run": {"corpus": {"validation": corpus}}}))
    return folder


def write_rows(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def power_law(floor: float, scale: float, exponent: float) -> Callable[[float], float]:
    return lambda flops: floor + scale * (flops / 1e9) ** -exponent


def figures(capsys, *arguments: Any, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert compare.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def fails(capsys, *arguments: Any) -> str:
    assert compare.main([*map(str, arguments)]) == 2
    return capsys.readouterr().err
