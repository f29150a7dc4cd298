"""Two tiny configurations, and a stand-in for `train.py` that can be started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import launch


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
