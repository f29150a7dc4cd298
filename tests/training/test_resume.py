"""Runs that are stopped, killed or damaged, and go on as if nothing had happened. Real processes throughout."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mode import accounting
from mode.config.file import load_config
from mode.runs import read_run
from tests import launch


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration, and an uninterrupted run of it to compare with."""
    folder = tmp_path_factory.mktemp("resume")
    config = launch.write_tiny(folder)
    launch.run(arguments(config, folder / "whole"), folder / "whole.log")
    return config, folder / "whole"


def arguments(config: Path, run_dir: Path, *more: str) -> list[str]:
    return ["--deepspeed_config", str(config), "--output_dir", str(run_dir), *more]


def stop_after(step: int) -> list[str]:
    return ["--set", f"mode.train.stop_after={step}"]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    name = (run_dir / "checkpoints" / "latest").read_text()
    file = run_dir / "checkpoints" / name / "mp_rank_00_model_states.pt"
    return torch.load(file, weights_only=False)["module"]


def saved_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def events(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(("perf/", "loss_by_time/"))]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def assert_same_run(run_dir: Path, whole: Path) -> None:
    """Every logged number, the final weights and router state, and TensorBoard are those of the whole run."""
    assert launch.reproducible(launch.metrics(run_dir)) == launch.reproducible(launch.metrics(whole))
    mine, theirs = weights(run_dir), weights(whole)
    assert mine.keys() == theirs.keys() and any("bias_J" in name for name in mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert events(run_dir) == events(whole)


def test_the_whole_run_logs_every_step_evaluates_and_keeps_the_last_checkpoints(world):
    _, whole = world
    rows = launch.metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "loss/val" in row] == [4, 8, 12]
    assert rows[-1]["tokens"] == 12 * 4 * 32
    assert rows[-1]["loss/train"] < rows[0]["loss/train"] - 0.3
    assert saved_steps(whole) == ["step_00000009", "step_00000012"]
    assert (whole / "checkpoints" / "latest").read_text() == "step_00000012"


@pytest.mark.parametrize("stops", [[6], [4, 7]], ids=["once", "a resume of a resume"])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one_to_the_bit(world, tmp_path, stops):
    config, whole = world
    for step in stops:
        launch.run(arguments(config, tmp_path / "run", *stop_after(step)), tmp_path / f"log{step}")
        assert launch.metrics(tmp_path / "run")[-1]["step"] == step
    job = launch.run(arguments(config, tmp_path / "run"), tmp_path / "log")
    assert f"at step {stops[-1]}" in job.output()
    assert_same_run(tmp_path / "run", whole)


def test_two_ranks_with_the_same_global_batch_give_the_losses_of_one_and_resume_exactly(world, tmp_path):
    config, whole = world
    launch.run(arguments(config, tmp_path / "two"), tmp_path / "log", ranks=2)
    compare = [("one rank", launch.metrics(whole), launch.metrics(tmp_path / "two"))]
    launch.run(arguments(config, tmp_path / "micro", "--set", "gradient_accumulation_steps=2"), tmp_path / "micro.log")
    compare.append(("two micro-batches", launch.metrics(whole), launch.metrics(tmp_path / "micro")))
    for name, expected, actual in compare:
        assert len(expected) == len(actual) == 12
        for a, b in zip(expected, actual, strict=True):
            for tag in ("loss/train", "loss/total", "loss/val", "optim/grad_norm"):
                if tag in a:
                    assert b[tag] == pytest.approx(a[tag], rel=1e-6), (name, a["step"], tag)
            assert (a["flops"], a["experts/no_op_share"]) == (b["flops"], b["experts/no_op_share"])
    whole_batch = ["--set", 'mode.experts.balance_loss={"weight": 0.3, "scope": "global"}']
    for ranks in (1, 2):
        launch.run(arguments(config, tmp_path / f"global{ranks}", *whole_batch), tmp_path / f"g{ranks}.log", ranks)
    rows = [launch.metrics(tmp_path / f"global{ranks}") for ranks in (1, 2)]
    for a, b in zip(*rows, strict=True):
        for tag in ("loss/train", "loss/expert_balance", "optim/grad_norm"):
            assert b[tag] == pytest.approx(a[tag], rel=1e-6), ("global scope", a["step"], tag)
    launch.run(arguments(config, tmp_path / "part", *stop_after(5)), tmp_path / "part.log", ranks=2)
    launch.run(arguments(config, tmp_path / "part"), tmp_path / "rest.log", ranks=2)
    assert_same_run(tmp_path / "part", tmp_path / "two")


def test_kill_9_at_random_moments_loses_nothing(world, tmp_path):
    """Fifteen kills of three runs; together with the kills inside a save below, twenty trials."""
    config, whole = world
    rng = random.Random(0)
    for number in range(3):
        run_dir = tmp_path / f"run{number}"
        for trial in range(5):
            job = launch.start(arguments(config, run_dir), tmp_path / f"{number}.{trial}.log")
            time.sleep(rng.uniform(0.2, 2.2))
            job.kill()
        launch.run(arguments(config, run_dir), tmp_path / f"{number}.log")
        assert_same_run(run_dir, whole)


def kill_in_save(where: str, call: int) -> None:
    """Makes the process kill itself inside a save, when it reaches `where` for the `call`-th time."""
    import mode.training.checkpoints.checkpoint as checkpoint

    original, calls = getattr(checkpoint, where), []

    def fatal(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(checkpoint, where, fatal)


def cut_file_then_die() -> None:
    """Kills the process in the middle of writing a file of the second checkpoint."""
    original = torch.save

    def fatal(*args, **kwargs):
        original(*args, **kwargs)
        path = args[1] if isinstance(args[1], str) else args[1].name
        if "step_00000006" in path:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = fatal


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(cut_file_then_die, id="half a file written"),
        pytest.param(partial(kill_in_save, "_checksums", 2), id="before the checksums"),
        pytest.param(partial(kill_in_save, "_write", 3), id="before the manifest"),
        pytest.param(partial(kill_in_save, "_write", 4), id="before latest"),
        pytest.param(partial(kill_in_save, "complete_checkpoints", 3), id="before old ones are deleted"),
    ],
)
def test_kill_9_during_a_save_loses_nothing(world, tmp_path, fault):
    config, whole = world
    job = launch.start(arguments(config, tmp_path / "run"), tmp_path / "log", before=fault)
    assert job.wait() == [-signal.SIGKILL], job.output()
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert (tmp_path / "run" / "checkpoints" / latest / "manifest.json").is_file(), "latest names a complete checkpoint"
    launch.run(arguments(config, tmp_path / "run"), tmp_path / "log2")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_one_rank_saves_and_exits_resumable(world, tmp_path, number, ranks):
    config, _ = world
    run_dir = tmp_path / "run"
    long = ["--set", "mode.train.steps=250", "--set", "mode.train.save_every=1000"]
    job = launch.start(arguments(config, run_dir, *long), tmp_path / "log", ranks)
    while not (run_dir / "metrics.jsonl").exists() or len(launch.metrics(run_dir)) < 3:
        assert all(process.is_alive() for process in job.processes), job.output()
        time.sleep(0.02)
    os.kill(job.processes[-1].pid, number)
    assert set(job.wait()) == {75}, job.output()
    last = int((run_dir / "checkpoints" / "latest").read_text().removeprefix("step_"))
    assert last < 250
    assert launch.metrics(run_dir)[-1]["step"] == (last if last % 4 else last - 1), "it is evaluated when resumed"
    assert "--resume auto" in job.output() and "the state is saved" in job.output()
    launch.run(arguments(config, run_dir, *long), tmp_path / "log2", ranks)
    launch.run(arguments(config, tmp_path / "straight", *long), tmp_path / "log3", ranks)
    assert_same_run(run_dir, tmp_path / "straight")


def poison_weights(rank: int, name: str) -> None:
    """From the fifth forward pass on, one weight of one rank is not a number."""
    if int(os.environ["RANK"]) != rank:
        return
    from mode.transformer.model import ModeTransformer

    original, calls = ModeTransformer.forward, []

    def forward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            self.get_parameter(name).data.view(-1)[0] = float("nan")
        return original(self, *args, **kwargs)

    ModeTransformer.forward = forward


def poison_gradient(rank: int, name: str) -> None:
    """From the third backward pass on, one gradient of one rank is infinite."""
    if int(os.environ["RANK"]) != rank:
        return
    from mode.training.loop import trainer

    build, calls = trainer.build_engine, []

    def poison(gradient):
        calls.append(1)
        return gradient * float("inf") if len(calls) == 5 else None

    def poisoned(run, model, world_size, universal):
        model.get_parameter(name).register_hook(poison)
        return build(run, model, world_size, universal)

    trainer.build_engine = poisoned


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            partial(poison_weights, 1, "blocks.1.body.attention.out.weight"),
            "the loss of rank 1 is not finite, first seen in block 1",
        ),
        (
            partial(poison_gradient, 1, "blocks.0.body.feed_forward.experts.w1"),
            "the gradient of rank 1 is not finite in block 0 experts",
        ),
    ],
    ids=["weight", "gradient"],
)
def test_what_is_not_finite_on_one_rank_stops_all_before_the_step(world, tmp_path, fault, words):
    config, _ = world
    run_dir = tmp_path / "run"
    no_evaluation = ["--set", "mode.train.eval_every=1000"]
    job = launch.start(arguments(config, run_dir, *no_evaluation), tmp_path / "log", ranks=2, before=fault)
    assert job.wait() == [3, 3], job.output()
    assert f"step 5: {words}" in job.output()
    assert "step_00000003" in job.output(), "the message names the last good checkpoint"
    assert launch.metrics(run_dir)[-1]["step"] == 4
    assert all(value.isfinite().all() for value in weights(run_dir).values())
    launch.run(arguments(config, run_dir, *no_evaluation), tmp_path / "log2", ranks=2)
    assert launch.metrics(run_dir)[-1]["step"] == 12


def limit_second_save() -> None:
    """From the second save on, the system refuses to let a file grow beyond 100 kB, as a full disk would."""
    from mode.training.checkpoints import checkpoint

    original, calls = checkpoint.save_checkpoint, []

    def save(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return original(*args, **kwargs)

    checkpoint.save_checkpoint = save


def test_a_disk_that_refuses_a_save_ends_the_run_with_a_message_and_the_previous_checkpoint_intact(world, tmp_path):
    config, whole = world
    job = launch.start(arguments(config, tmp_path / "run"), tmp_path / "log", before=limit_second_save)
    assert job.wait() == [4], job.output()
    assert "the checkpoint of step 6 could not be written" in job.output()
    assert "no space: the disk took only a part of a file" in job.output() and "unexpected pos" not in job.output()
    assert "make room and resume" in job.output()
    assert saved_steps(tmp_path / "run") == ["step_00000003"]
    launch.run(arguments(config, tmp_path / "run"), tmp_path / "log2")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("injury", ["truncated", "one bit", "missing file", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(world, tmp_path, injury):
    config, whole = world
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    newest = run_dir / "checkpoints" / "step_00000012"
    file = newest / "mp_rank_00_model_states.pt"
    if injury == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif injury == "one bit":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    elif injury == "missing file":
        file.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    job = launch.run(arguments(config, run_dir), tmp_path / "log")
    assert "step_00000012 is damaged" in job.output() and "at step 9" in job.output()
    assert_same_run(run_dir, whole)
    assert saved_steps(run_dir) == ["step_00000009", "step_00000012", "step_00000012.damaged"], "kept aside"


def test_resuming_another_model_or_a_folder_without_checkpoints_is_refused(world, tmp_path):
    config, whole = world
    shutil.copytree(whole, tmp_path / "run")
    cases = [
        (["--set", "mode.model.width=64"], "mode.model.width: is 64 but 32 in"),
        (["--set", "train_batch_size=8"], "train_batch_size: is 8 but 4 in"),
        (["--set", "mode.data.max_documents=11"], "mode.data.max_documents: is 11 but null in"),
        (["--set", "mode.experts.balance_loss=null"], 'mode.experts.balance_loss: is null but {"weight": 0.01'),
        (["--set", "mode.depth.aux_loss={}"], 'mode.depth.aux_loss: is {"weight": 0.01} but null in'),
        (["--set", "mode.depth=null"], 'mode.depth: is null but {"capacity_fraction": 0.25'),
        (["--set", "mode.experts=null", "--extend"], 'mode.experts: is null but {"num_experts": 4'),
        (["--resume", " "], "--resume: is empty"),
        (["--resume", str(tmp_path / "nowhere")], "--resume"),
    ]
    for number, (more, words) in enumerate(cases):
        job = launch.start(arguments(config, tmp_path / "run", *more), tmp_path / f"log{number}")
        assert job.wait() == [2], job.output()
        assert words in job.output() and "Traceback" not in job.output()


def files(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


def test_another_plan_or_fewer_steps_than_are_done_are_refused_and_nothing_is_rewritten(world, tmp_path):
    config, whole = world
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    before = files(run_dir)
    newest = run_dir / "checkpoints" / "step_00000012"
    cases = [
        (["mode.train.steps=20"], f"mode.train.steps: is 20 but 12 in {newest}"),
        (["mode.train.tokens=2560"], f"mode.train.steps: is 20 but 12 in {newest}"),
        (["optimizer.params.lr=0.001"], f"optimizer.params.lr: is 0.001 but 0.003 in {newest}"),
        (["scheduler.params.warmup_num_steps=3"], 'scheduler.params.warmup_num_steps: is 3 but "auto" in'),
        (["gradient_clipping=0.5"], "gradient_clipping: is 0.5 but 1.0 in"),
    ]
    for number, (settings, words) in enumerate(cases):
        more = [argument for setting in settings for argument in ("--set", setting)]
        job = launch.start(arguments(config, run_dir, *more), tmp_path / f"log{number}")
        assert job.wait() == [2], job.output()
        ways = ("--resume never", "another --output_dir", "--extend", "mode.train.stop_after")
        assert words in job.output() and all(way in job.output() for way in ways)
    fewer = arguments(config, run_dir, "--set", "mode.train.steps=8")
    for number, more in enumerate([[], ["--extend"]]):
        job = launch.start([*fewer, *more], tmp_path / f"fewer{number}")
        assert job.wait() == [2], job.output()
        (line,) = [line for line in job.output().splitlines() if line.startswith("error: ")]
        assert f"mode.train.steps: is 8, but {newest} has 12 already" in line and "--resume never" in line
    assert files(run_dir) == before
    same = ["mode.train.tokens=1536", "mode.train.eval_every=5", "optimizer.params.torch_adam=true"]  # 12 steps, too
    more = [argument for setting in same for argument in ("--set", setting)]
    assert "this run is complete" in launch.run(arguments(config, run_dir, *more), tmp_path / "same").output()


def test_an_extended_run_follows_the_new_plan_from_its_checkpoint_on_and_says_so(world, tmp_path):
    config, whole = world
    run_dir, found = tmp_path / "run", whole / "checkpoints" / "step_00000009"
    plan = {"mode.train.steps": 20, "optimizer.params.lr": 0.002, "optimizer.params.weight_decay": 0.5}
    settings = [argument for path, value in plan.items() for argument in ("--set", f"{path}={value}")]
    changes = {"mode.train.steps": [12, 20], "optimizer.params.lr": [0.003, 0.002]}
    changes |= {"optimizer.params.weight_decay": [None, 0.5]}
    job = launch.run(arguments(config, run_dir, "--resume", str(found), "--extend", *settings), tmp_path / "log")
    assert "extended at step 9, its schedules planned anew: mode.train.steps from 12 to 20, " in job.output()
    rows = launch.metrics(run_dir)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.002)
    scheduler = WarmupCosineLR(optimizer, total_num_steps=20, warmup_num_steps=2)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert [row["optim/lr"] for row in rows] == rates[9:]
    depth = load_config(config).depth
    kept = [accounting.depth_capacity(accounting.capacity_fraction_at(depth, step, 20), 32) for step in range(9, 20)]
    assert [row["depth/kept_fraction"] * 32 for row in rows] == kept and kept[0] > kept[-1]
    last = run_dir / "checkpoints" / "step_00000020"
    state = torch.load(last / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.5}
    expected = [{"step": 9, "changes": changes}]
    assert json.loads((run_dir / "extensions.json").read_text()) == expected == read_run(run_dir).extensions
    assert json.loads((last / "manifest.json").read_text())["run"]["extensions"] == expected
    assert "this run is complete" in launch.run(arguments(config, run_dir, *settings), tmp_path / "again").output()
    assert json.loads((run_dir / "extensions.json").read_text()) == expected, "one extension, however often resumed"
    launch.run(arguments(config, run_dir, "--resume", "never", *stop_after(1)), tmp_path / "afresh")
    assert not (run_dir / "extensions.json").exists(), "a run that starts afresh has one plan"


def test_a_validation_loss_that_is_not_finite_ends_the_run_and_metrics_stay_json(world, tmp_path):
    config, _ = world
    settings = ("mode.train.steps=3", "optimizer.params.lr=1e30", "mode.train.save_every=2")
    more = [argument for setting in settings for argument in ("--set", setting)]
    job = launch.start(arguments(config, tmp_path / "run", *more), tmp_path / "log")
    assert job.wait() == [3], job.output()
    (line,) = [line for line in job.output().splitlines() if line.startswith("error: ")]
    assert "step 3: loss/val is nan; the last good checkpoint is" in line
    assert "step_00000002" in line and "lower learning rate" in line
    assert saved_steps(tmp_path / "run") == ["step_00000002"], "the model is not saved"
    *_, last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(last, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["step"] == 3 and row["loss/val"] is None


def test_resume_takes_a_path_and_never_starts_afresh(world, tmp_path):
    config, whole = world
    job = launch.run(
        arguments(config, tmp_path / "fork", "--resume", str(whole / "checkpoints" / "step_00000009")), tmp_path / "a"
    )
    assert "at step 9" in job.output()
    assert launch.reproducible(launch.metrics(tmp_path / "fork")) == launch.reproducible(launch.metrics(whole))[9:]
    before = sorted((tmp_path / "fork").rglob("*"))
    other = str(whole / "checkpoints" / "step_00000009")
    job = launch.start(arguments(config, tmp_path / "fork", "--resume", other), tmp_path / "mixed")
    assert job.wait() == [2] and "holds a run of its own" in job.output()
    assert sorted((tmp_path / "fork").rglob("*")) == before, "nothing of the run that is there is changed"
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    job = launch.run(arguments(config, again, "--resume", "never", *stop_after(4)), tmp_path / "b")
    assert "starting at step 0" in job.output()
    assert saved_steps(again) == ["step_00000003", "step_00000004"], "the old run's checkpoints are replaced"
    command = arguments(again / "config.json", again)  # the command that a stopped run prints
    assert "at step 4" in launch.run(command, tmp_path / "c").output()
    assert_same_run(again, whole)


def test_a_changed_corpus_is_not_taken_for_the_same_run(world, tmp_path):
    config = launch.write_tiny(tmp_path)
    launch.run(arguments(config, tmp_path / "run", *stop_after(4)), tmp_path / "a")
    with (tmp_path / "corpus" / "03.txt").open("a") as file:
        file.write("one more line\n")
    job = launch.start(arguments(config, tmp_path / "run"), tmp_path / "b")
    assert job.wait() == [2], job.output()
    assert "corpus.train.num_tokens: is" in job.output()
