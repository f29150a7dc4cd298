"""Runs that are asked to stop, save slowly, or find their checkpoints damaged, late or unreadable. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from mode.training.checkpoints import checkpoint as checkpoints
from tests import launch
from tests.training.test_resume import arguments, assert_same_run, saved_steps, stop_after


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration, and an uninterrupted run of it to compare with."""
    folder = tmp_path_factory.mktemp("stopping")
    config = launch.write_tiny(folder)
    launch.run(arguments(config, folder / "whole"), folder / "whole.log")
    return config, folder / "whole"


def terminate(module: str, name: str, rank: int, call: int = 1) -> None:
    """Sends this rank a SIGTERM when it calls a function for the `call`-th time."""
    import importlib

    place = importlib.import_module(module)
    original, calls = getattr(place, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    setattr(place, name, interrupted)


def die_in_an_evaluation_after_a_signal_in_step(step: int) -> None:
    """As a launcher does that kills what has not ended soon after SIGTERM."""
    from mode.training.loop import trainer

    terminate("mode.training.loop.step", "model_inputs", rank=0, call=step)
    trainer.evaluate = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("step", [4, 12], ids=["on the way", "in the last step"])
def test_a_stopped_run_saves_at_once_and_evaluates_when_it_is_resumed(world, tmp_path, step):
    config, whole = world
    command, settings = arguments(config, tmp_path / "run"), ["--set", "mode.train.eval_every=4"]
    if step == 12:  # earlier evaluations would be the death of it
        launch.run([*command, *settings, *stop_after(11)], tmp_path / "first")
    fault = partial(die_in_an_evaluation_after_a_signal_in_step, 1 if step == 12 else step)
    job = launch.start([*command, *settings], tmp_path / "log", before=fault)
    assert job.wait() == [75], job.output()
    assert saved_steps(tmp_path / "run")[-1] == f"step_{step:08d}"
    launch.run([*command, *settings], tmp_path / "rest")
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("fault", "ranks", "codes"),
    [
        pytest.param(partial(terminate, "mode.data", "prepare_data", 0), 1, [75], id="preparing data"),
        pytest.param(partial(terminate, "mode.training.loop.trainer", "build_engine", 1), 2, [75, 75], id="building"),
        pytest.param(partial(terminate, "mode.training.loop.trainer", "closing_table", 0), 1, [75], id="closing table"),
    ],
)
def test_a_signal_outside_of_the_loop_ends_in_75_too(world, tmp_path, fault, ranks, codes):
    config, whole = world
    run_dir = tmp_path / "run"
    if ranks == 1:
        shutil.copytree(whole, run_dir)
    job = launch.start(arguments(config, run_dir), tmp_path / "log", ranks, before=fault)
    assert job.wait() == codes, job.output()
    assert "Traceback" not in job.output()
    if ranks == 2:
        assert "stopped before the first step; start the same command again" in job.output()
        assert not (run_dir / "checkpoints").exists()
    else:
        assert saved_steps(run_dir) == saved_steps(whole), "what was there is untouched"


SECONDS = 0.6  # that a file takes
LIMIT = 3  # seconds without progress; a save takes longer


def write_and_read_slowly() -> None:
    """Rank 0 writes and reads back its files slowly, and the other waits for it."""
    if os.environ["RANK"] != "0":
        return
    save, read = torch.save, checkpoints._read

    def slow_save(*args: Any, **kwargs: Any) -> None:
        time.sleep(SECONDS)
        save(*args, **kwargs)

    def slow_read(*args: Any) -> Any:
        for part in read(*args):
            time.sleep(SECONDS)
            yield part

    torch.save, checkpoints._read = slow_save, slow_read


def see_no_checkpoint(rank: int) -> None:
    """As on a node whose network file system is late to list what another has written."""
    if int(os.environ["RANK"]) == rank:
        checkpoints.numbered = lambda folder: []


def test_a_slow_save_completes_and_is_resumed_by_ranks_that_do_not_see_it_too(world, tmp_path):
    config, _ = world
    settings = ["--set", f"mode.train.watchdog_seconds={LIMIT}", "--set", "mode.train.eval_every=100"]
    command = arguments(config, tmp_path / "run", *settings)
    launch.run([*command, *stop_after(1)], tmp_path / "log", 2, write_and_read_slowly)
    num_files = len(list((tmp_path / "run" / "checkpoints" / "step_00000001").iterdir()))
    assert num_files / 2 * SECONDS > LIMIT, "reading alone takes rank 0 longer"
    job = launch.run([*command, *stop_after(2)], tmp_path / "log2", 2, partial(see_no_checkpoint, 1))
    assert "at step 1" in job.output()


def test_nothing_is_deleted_when_no_checkpoint_is_whole_or_one_cannot_be_read(world, tmp_path):
    config, whole = world
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    files = [folder / "mp_rank_00_model_states.pt" for folder in sorted((run_dir / "checkpoints").glob("step_*"))]
    files[-1].unlink()
    files[-1].symlink_to("/proc/self/mem")  # the system answers with an I/O error
    job = launch.start(arguments(config, run_dir), tmp_path / "unreadable")
    assert job.wait() == [4], job.output()
    assert "step_00000012 cannot be read: [Errno 5]" in job.output() and "nothing was resumed" in job.output()
    files[-1].unlink()
    os.truncate(files[0], 1000)
    (run_dir / "checkpoints" / "step_00000012.incomplete").mkdir()
    before = sorted(run_dir.rglob("*"))
    job = launch.start(arguments(config, run_dir), tmp_path / "damaged")
    assert job.wait() == [2], job.output()
    for words in ("every checkpoint", "is damaged", "nothing was changed or deleted", "--resume never", "--output_dir"):
        assert words in job.output()
    assert sorted(run_dir.rglob("*")) == before


def test_a_manifest_that_is_not_what_was_written_is_damage(world, tmp_path, capsys):
    _, whole = world
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "step_00000012" / "manifest.json"
    good = json.loads(file.read_text())
    without_run = {name: value for name, value in good.items() if name != "run"}
    bad = [without_run, good | {"run": None}, good | {"files": list(good["files"])}, good | {"files": {}}, [], None, 1]
    bad += [good | {"run": good["run"] | {name: None}} for name in ("mode", "plan", "layout")] + [
        good | {"run": {"a": 1}}
    ]
    for text in (*map(json.dumps, bad), "{", "[" * 100_000, "\0"):
        file.write_text(text)
        assert checkpoints.newest_whole(tmp_path / "checkpoints").name == "step_00000009", text[:100]
        assert "step_00000012 is damaged (its manifest " in capsys.readouterr().err
    file.unlink()
    assert checkpoints.newest_whole(tmp_path / "checkpoints").name == "step_00000009"
    file.write_text(json.dumps(good))
    assert checkpoints.newest_whole(tmp_path / "checkpoints").name == "step_00000012"


def list_threads_at_the_end() -> None:
    """Prints the names of this process's threads when `train.py` has nothing left to do but to return."""
    import train

    original = train.fail

    def fail(*args: Any, **kwargs: Any) -> int:
        names = []
        for file in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # the watchdog's may be about to end
                names.append(file.read_text().strip())
        print(f"threads: {' '.join(names)}")
        return original(*args, **kwargs)

    train.fail = fail


def test_no_thread_of_the_process_group_is_left_to_abort_a_refused_run(world, tmp_path):
    """Such a thread may meet the end of the interpreter: SIGABRT instead of exit code 2, now and then."""
    config, _ = world
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        job = launch.start(arguments(config, tmp_path / "run"), tmp_path / "log", 2, list_threads_at_the_end)
        assert job.wait() == [2, 2], job.output()
    assert "is in use by another run" in job.output()
    assert job.output().count("threads: ") == 2 and "gloo" not in job.output()


def test_a_signal_that_comes_while_the_interpreter_ends_changes_no_exit_code():
    late = "atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    script = f"import atexit, os, runpy, signal; {late}; runpy.run_path('train.py', run_name='__main__')"
    command = [sys.executable, "-c", script, "--deepspeed_config", "nowhere.json"]
    done = subprocess.run(command, cwd=launch.ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
