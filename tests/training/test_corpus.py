"""Runs whose packed corpus is damaged, or is not the same on all ranks. Real processes throughout."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import mode.data.checked as checked
from tests import launch


def check_few_blocks_at_the_start() -> None:
    """As for a cache that is too large to be read whole."""
    checked.BLOCK, checked.SPOT_CHECKS = 256, 1


def test_damage_found_while_training_stops_the_run_and_starting_again_mends_it(tmp_path: Path) -> None:
    config = launch.write_tiny(tmp_path)
    arguments = ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / "run")]
    before = check_few_blocks_at_the_start
    launch.run([*arguments, "--set", "mode.train.stop_after=3"], tmp_path / "a", before=before)
    (tokens,) = (tmp_path / "cache").glob("*/train.bin")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:256] + bytes(len(content) - 256))

    job = launch.start(arguments, tmp_path / "b", before=before)
    assert job.wait() == [4], job.output()
    assert "at step 3" in job.output() and "Traceback" not in job.output()
    assert f"error: rank 0: {tokens}: the block at byte" in job.output()
    assert "start again: the data cache is then built again from its source" in job.output()

    job = launch.run([*arguments, "--set", "mode.train.stop_after=4"], tmp_path / "c", before=before)
    assert "building the data cache again from" in job.output() and "at step 3" in job.output()
    assert tokens.read_bytes() == content


def use_a_home_of_ones_own(folder: str) -> None:
    os.environ["HOME"] = f"{folder}/home{os.environ['RANK']}"


def test_ranks_whose_corpora_differ_are_named_before_the_run_starts(tmp_path: Path) -> None:
    for rank in range(2):
        config = launch.write_tiny(tmp_path / f"home{rank}")
    with (tmp_path / "home1" / "corpus" / "03.txt").open("a") as file:
        file.write("one more line\n")
    document = json.loads(config.read_text())
    document["mode"]["data"] |= {"files": {"paths": ["~/corpus/*.txt"]}, "cache_dir": "~/cache"}
    config.write_text(json.dumps(document))
    arguments = ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / "run")]
    before = partial(use_a_home_of_ones_own, str(tmp_path))
    job = launch.start(arguments, tmp_path / "log", ranks=2, before=before)
    assert job.wait() == [2, 2], job.output()
    assert "mode.data: the corpus is not the same on all ranks: ranks [1] have other tokens" in job.output()
    assert f"rank 1: {tmp_path}/home1/cache/" in job.output() and "Traceback" not in job.output()
    assert not (tmp_path / "run" / "checkpoints").exists()
