"""Models of every kind, and `tools/routing.py` on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mode.data import prepare_data, spread_rows, validation_batches
from mode.transformer.model import ModeTransformer
from tests import launch
from tests.helpers import NO_OPS

sys.path.append(str(launch.ROOT / "tools"))  # as when the tool is run as a script
from tools import routing  # noqa: E402

PREDICTOR = {"predictor": {"width": 8}}
KINDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {  # experts, depth
    "dense": (None, None),
    "moe": ({}, None),
    "mod": (None, {}),
    "stochastic": (None, {"selection": "stochastic", "gate": "one"}),
    "token_choice": ({}, {"selection": "token_choice"}),
    "staged": ({}, PREDICTOR),
    "integrated": (NO_OPS, None),
    "both": (NO_OPS, PREDICTOR),
}


def report(capsys, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert routing.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert routing.main([*map(str, arguments)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == shown.count("warning: ") + 1, "one line, after warnings"
    return shown


def open_model(folder: Path, num_rows: int, batch_size: int) -> tuple[ModeTransformer, list[Any]]:
    model = ModeTransformer.from_pretrained(folder)
    data = prepare_data(model.config)
    end = data.tokenizer.end_of_text if model.config.data.document_masking else None
    rows = spread_rows(data.validation.rows, num_rows)
    return model, list(validation_batches(rows, batch_size=batch_size, end_of_text=end))
