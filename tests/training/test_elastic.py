"""A run goes on with another number of ranks, expert-parallel size, ZeRO stage or precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Job, metrics, reproducible, run, start, write_tiny

STEPS, SAVED = 10, 5
Layout = tuple[int, int, int]  # ranks, ep_size, ZeRO stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    write_tiny(folder)
    return folder


def train(folder: Path, name: str, layout: Layout, *arguments: str, expect: int = 0) -> Job:
    """Trains `folder/name` to the end, or from what it already has."""
    ranks, ep_size, stage = layout
    settings = {
        "mode.experts.ep_size": ep_size,
        "zero_optimization.stage": stage,
        "mode.train.steps": STEPS,
        "mode.train.save_every": SAVED,
        "mode.train.eval_every": STEPS,
    }
    command = ["--deepspeed_config", str(folder / "tiny.json"), "--output_dir", str(folder / name)]
    for path, value in settings.items():
        command += ["--set", f"{path}={value}"]
    job = start([*command, *arguments], folder / f"{name}.log", ranks)
    codes = job.wait()
    assert codes == [expect] * ranks, f"exit codes {codes}; output:\n{job.output()}"
    return job


def losses(folder: Path, name: str) -> dict[int, list[float]]:
    """{step: [loss, gradient norm, learning rate]} after the checkpoint."""
    return {
        int(row["step"]): [row["loss/train"], row["optim/grad_norm"], row["optim/lr"]]
        for row in metrics(folder / name)
        if "loss/train" in row and row["step"] > SAVED
    }


def assert_same_course(folder: Path, name: str, uninterrupted: str, tolerance: float = 1e-5) -> None:
    ours, theirs = losses(folder, name), losses(folder, uninterrupted)
    assert list(ours) == list(theirs) == list(range(SAVED + 1, STEPS + 1))
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=tolerance), f"step {step}"


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """A run on 4 ranks with EP 2 and ZeRO-2, and its checkpoint of step 5."""
    train(folder, "source", (4, 2, 2))
    return folder / "source" / "checkpoints" / f"step_{SAVED:08d}"


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize(("ranks", "ep_size"), ((1, 1), (4, 4), (2, 2)))
def test_a_run_goes_on_with_other_ranks_experts_and_stage(
    folder: Path, source: Path, ranks: int, ep_size: int, stage: int
) -> None:
    name = f"ranks_{ranks}_stage_{stage}"
    train(folder, name, (ranks, ep_size, stage), "--resume", str(source))
    assert_same_course(folder, name, "source")
    assert not list((folder / name / "checkpoints").glob("*.universal")), "the copy is deleted"


def test_from_stage_3_and_back_in_one_directory_and_then_to_the_bit(folder: Path) -> None:
    train(folder, "whole", (2, 2, 3))
    train(folder, "moving", (2, 2, 3), "--set", f"mode.train.stop_after={SAVED}")
    job = train(folder, "moving", (1, 1, 2))  # --resume auto
    assert "ranks 2, ep_size 2, zero_stage 3" in job.output() and "ranks 1, ep_size 1, zero_stage 2" in job.output()
    assert_same_course(folder, "moving", "whole")
    # What a moved run saves is an ordinary checkpoint of its new layout: from it the run repeats itself exactly.
    before = reproducible(metrics(folder / "moving"))
    last = folder / "moving" / "checkpoints" / f"step_{STEPS:08d}"
    train(folder, "moving", (1, 1, 2), "--resume", str(last), "--extend", "--set", f"mode.train.steps={STEPS + 2}")
    again = reproducible(metrics(folder / "moving"))
    assert again[: len(before)] == before and len(again) == len(before) + 2


def test_a_model_without_experts_moves_too(folder: Path) -> None:
    train(folder, "dense", (2, 1, 2), "--set", "mode.experts=null")
    checkpoint = folder / "dense" / "checkpoints" / f"step_{SAVED:08d}"
    train(folder, "dense_moved", (1, 1, 3), "--set", "mode.experts=null", "--resume", str(checkpoint))
    assert_same_course(folder, "dense_moved", "dense")


@pytest.mark.parametrize("stage", (1, 3))
def test_half_precision_moves_with_its_float32_copies(folder: Path, stage: int) -> None:
    bf16 = ("--set", "bf16.enabled=true")
    train(folder, f"half_{stage}", (2, 2, stage), *bf16)
    checkpoint = folder / f"half_{stage}" / "checkpoints" / f"step_{SAVED:08d}"
    train(folder, f"half_moved_{stage}", (1, 1, 4 - stage), *bf16, "--resume", str(checkpoint))
    assert_same_course(folder, f"half_moved_{stage}", f"half_{stage}", tolerance=5e-3)


def test_stage_0_goes_on_with_another_number_of_ranks(folder: Path) -> None:
    train(folder, "zero_0", (2, 1, 0))
    checkpoint = folder / "zero_0" / "checkpoints" / f"step_{SAVED:08d}"
    job = train(folder, "zero_0_moved", (1, 1, 0), "--resume", str(checkpoint))
    assert "bringing" not in job.output()
    assert_same_course(folder, "zero_0_moved", "zero_0")


def test_what_a_killed_conversion_left_behind_is_deleted_at_the_next_start(folder: Path) -> None:
    train(folder, "tidy", (1, 1, 1), "--set", f"mode.train.stop_after={SAVED}")
    for name in ("step_00000005.universal", "step_00000005.universal_abc123", "step_00000007.incomplete"):
        (folder / "tidy" / "checkpoints" / name).mkdir()
    train(folder, "tidy", (1, 1, 1))
    kept = {path.name for path in (folder / "tidy" / "checkpoints").glob("step_*")}
    assert kept == {"step_00000005", "step_00000010"}


def test_another_optimizer_or_sub_group_size_is_not_taken_for_the_same(folder: Path) -> None:
    train(folder, "grouped", (1, 1, 3), "--set", f"mode.train.stop_after={SAVED}")
    output = train(
        folder, "grouped", (1, 1, 3), "--set", 'optimizer={"type": "SGD", "params": {"lr": 0.1}}', expect=2
    ).output()
    assert 'optimizer.type: is "SGD" but "AdamW" in' in output
    job = train(folder, "grouped", (1, 1, 3), "--set", "zero_optimization.sub_group_size=5000")
    assert "bringing" in job.output()


def test_stage_0_cannot_move_and_says_what_can(folder: Path, source: Path) -> None:
    output = train(folder, "to_0", (1, 1, 0), "--resume", str(source), expect=2).output()
    assert "zero_optimization.stage" in output and "export" in output and "ranks 4, ep_size 2, zero_stage 2" in output


def test_another_model_is_refused_before_anything_is_converted(folder: Path, source: Path) -> None:
    output = train(
        folder, "other", (1, 1, 1), "--resume", str(source), "--set", "mode.model.num_layers=3", expect=2
    ).output()
    assert "mode.model.num_layers" in output and "bringing" not in output


def test_a_checkpoint_that_deepspeed_cannot_convert_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    document["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    document["zero_allow_untested_optimizer"] = True
    config = tmp_path / "sgd.json"
    config.write_text(json.dumps(document))
    command = ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / "run")]
    run([*command, "--set", "mode.train.stop_after=3"], tmp_path / "log", ranks=2)
    job = start(command, tmp_path / "log", ranks=1)
    assert job.wait() == [2]
    assert "cannot be brought to another layout" in job.output() and "Traceback" not in job.output()
