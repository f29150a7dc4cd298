"""Ranks that die or hang: the others leave in time, say where they were, and the run goes on. Real processes."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from functools import partial

import pytest
import torch

from mode.training.safety import watchdog
from mode.training.safety.stops import EXIT_WATCHDOG
from tests import launch
from tests.training.test_resume import arguments, kill_in_save

LIMIT = 6  # seconds without progress
SLACK = 6  # for a look of the watchdog and a busy machine
WATCHED = ["--set", f"mode.train.watchdog_seconds={LIMIT}"]
LONG = [*WATCHED, "--set", "mode.train.steps=5000", "--set", "mode.train.save_every=5000"]
INSIDE = r", inside \w+ \(called from mode/"
IN_A_STEP = r".* at (step|the evaluation after step|the save of step) \d+" + INSIDE


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return launch.write_tiny(tmp_path_factory.mktemp("watchdog"))


def wait_for_steps(job: launch.Job, number: int) -> None:
    """Until this job has logged so many steps of its own."""
    while len(re.findall(r"^step +\d+/", job.logs[0].read_text() if job.logs[0].exists() else "", re.M)) < number:
        assert all(process.is_alive() for process in job.processes), job.output()
        time.sleep(0.01)


def assert_left(job: launch.Job, rank: int, words: str = IN_A_STEP) -> None:
    """The rank has gone by itself, and said why in one line."""
    output = job.logs[rank].read_text()
    assert job.processes[rank].exitcode == EXIT_WATCHDOG, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.match(f"error: rank {rank}: {words}", errors[0]), output
    assert "start the same command again" in errors[0] and "Traceback" not in output


def join(job: launch.Job, ranks: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        job.processes[rank].join(max(0.0, deadline - time.monotonic()))


def test_when_a_rank_hangs_the_others_leave_within_the_limit_even_if_asked_to_stop(config, tmp_path):
    job = launch.start(arguments(config, tmp_path / "run", *LONG, "--set", "train_batch_size=3"), tmp_path / "log", 3)
    try:
        wait_for_steps(job, 3)
        os.kill(job.processes[1].pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(job.processes[2].pid, signal.SIGTERM)  # as the launcher does; a blocked rank never looks at its flag
        join(job, [0, 2], LIMIT + SLACK)
        for rank in (0, 2):
            assert_left(job, rank)
        assert f"no progress for {LIMIT} s" in job.output()  # the first to leave; that may be what the other notices
        os.kill(job.processes[1].pid, signal.SIGCONT)
        join(job, [1], LIMIT + SLACK)
        assert_left(job, 1)
    finally:
        job.kill()


def test_when_a_rank_is_killed_the_other_leaves_and_names_the_step_it_was_in(config, tmp_path):
    job = launch.start(arguments(config, tmp_path / "run", *LONG), tmp_path / "log", 2)
    try:
        wait_for_steps(job, 3)
        job.processes[1].kill()
        join(job, [0, 1], LIMIT + SLACK)
        assert_left(job, 0)
        steps = re.findall(r"^step +(\d+)/", job.logs[0].read_text(), re.M)
        named = re.search(r"lost at (?:step|the evaluation after step) (\d+)", job.logs[0].read_text())
        assert named is not None and int(named[1]) == int(steps[-1]) + 1, job.output()
    finally:
        job.kill()


def hang(rank: int, step: int) -> None:
    """Makes the rank sleep for ever in its own work of a step."""
    from mode.training.loop import step as training_step

    original, calls = training_step.model_inputs, []

    def inputs(*args, **kwargs):
        calls.append(1)
        if len(calls) == step and int(os.environ["RANK"]) == rank:
            time.sleep(3600)
        return original(*args, **kwargs)

    training_step.model_inputs = inputs


def test_a_rank_that_hangs_in_its_own_work_says_so_itself(config, tmp_path):
    job = launch.start(arguments(config, tmp_path / "run", *LONG), tmp_path / "log", 2, before=partial(hang, 1, 3))
    try:
        wait_for_steps(job, 2)
        join(job, [0, 1], LIMIT + SLACK)
        assert_left(job, 0, r".* at step 3" + INSIDE)
        place = r"\(in mode/training/loop/step.py:\d+ in optimizer_step\)"
        assert_left(job, 1, rf".* at step 3, outside any collective {place}; this rank hangs")
    finally:
        job.kill()


def test_a_rank_that_never_starts_is_reported_with_the_address_and_the_number_of_ranks(config, tmp_path):
    job = launch.start(arguments(config, tmp_path / "run", *WATCHED), tmp_path / "log", 2, before=stay_away)
    try:
        join(job, [0], 30 + LIMIT + SLACK)  # an import and the data come before the limit counts
        assert_left(
            job, 0, r"no progress for 6 s at the start, joining 2 ranks at 127\.0\.0\.1:\d+, inside init_process_g"
        )
    finally:
        job.kill()


def stay_away() -> None:
    if os.environ["RANK"] == "1":
        os._exit(0)


KILLS, KILL_IN_SAVE = 6, 3  # how often, and which of them is inside a save


def kill_rank_in_save(rank: int) -> None:
    """Its files are written, the checksums are not."""
    if int(os.environ["RANK"]) == rank:
        kill_in_save("_files", 1)


def test_a_run_whose_ranks_are_killed_again_and_again_equals_the_uninterrupted_one_to_the_bit(config, tmp_path):
    """Once connected, a broken connection is noticed at once: they have less time to leave than the limit."""
    ranks, settings = 4, ["--set", "mode.train.watchdog_seconds=60", "--set", "mode.train.steps=60"]
    launch.run(arguments(config, tmp_path / "whole", *settings), tmp_path / "whole.log", ranks)
    command = arguments(config, tmp_path / "run", *settings, "--resume", "auto")
    rng, last_steps = random.Random(0), []
    for kill in range(1, KILLS + 1):
        victim, steps, delay = rng.randrange(ranks), rng.randint(1, 5), rng.uniform(0, 0.1)
        fault = partial(kill_rank_in_save, victim) if kill == KILL_IN_SAVE else None
        job = launch.start(command, tmp_path / f"{kill}.log", ranks, before=fault)
        try:
            if fault is None:
                wait_for_steps(job, steps)
                time.sleep(delay)
                os.kill(job.processes[victim].pid, signal.SIGKILL)
            else:
                join(job, [victim], 60)
            join(job, list(range(ranks)), LIMIT + SLACK)
            assert job.processes[victim].exitcode == -signal.SIGKILL, job.output()
            for survivor in set(range(ranks)) - {victim}:
                assert_left(job, survivor, IN_A_STEP if fault is None else r".* at the save of step \d+" + INSIDE)
        finally:
            job.kill()
        last_steps.append(launch.metrics(tmp_path / "run")[-1]["step"])
    assert sum(step > 1 for step in last_steps) >= KILLS // 2 and max(last_steps) < 60, last_steps
    launch.run(command, tmp_path / "rest.log", ranks)
    mine, whole = launch.metrics(tmp_path / "run"), launch.metrics(tmp_path / "whole")
    assert len(whole) == 60 and launch.reproducible(mine) == launch.reproducible(whole)


# ---- reading a stack ----


def call(file: str, name: str, line: str = "") -> traceback.FrameSummary:
    return traceback.FrameSummary(file, 31, name, line=line, lookup_line=False)


SITE = "/usr/lib/site-packages"
C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
DISPATCH = str(watchdog.PACKAGE / "moe" / "dispatch.py")
MAIN = call("train.py", "main")


@pytest.mark.parametrize(
    ("stacks", "words"),
    [
        pytest.param(
            [
                [
                    call(C10D, "all_to_all_single"),
                    call(f"{SITE}/c10d_logger.py", "wrapper"),
                    call(DISPATCH, "send"),
                    MAIN,
                ]
            ],
            "inside all_to_all_single (called from mode/moe/dispatch.py:31 in send)",
            id="a collective",
        ),
        pytest.param(
            [[call(C10D, "_new_group_with_tag"), call(C10D, "new_group"), MAIN]], "inside new_group", id="its helpers"
        ),
        pytest.param(
            [[call(DISPATCH, "send"), MAIN], [call("/usr/lib/queue.py", "get")], [call(C10D, "all_reduce")]],
            "inside all_reduce (called from mode/moe/dispatch.py:31 in send)",
            id="a collective of the backward thread",
        ),
        pytest.param(
            [[call(f"{SITE}/deepspeed/zero.py", "wait", "handle.wait()"), call(DISPATCH, "send")]],
            "inside wait for a collective started earlier (called from mode/moe/dispatch.py:31 in send)",
            id="waiting for an earlier one",
        ),
        pytest.param(
            [[call("/usr/lib/threading.py", "wait", "self._cond.wait(timeout)"), call(DISPATCH, "send")]],
            "outside any collective (in mode/moe/dispatch.py:31 in send)",
            id="own work",
        ),
        pytest.param([[MAIN]], "outside any collective", id="nothing known"),
    ],
)
def test_the_innermost_collective_and_the_innermost_call_of_this_package_are_named(stacks, words):
    assert watchdog.whereabouts(stacks) == words


def test_the_stacks_are_those_of_the_other_threads_from_the_innermost_call_outwards():
    entered, leave = threading.Event(), threading.Event()

    def inner() -> None:
        entered.set()
        leave.wait()

    def outer() -> None:
        inner()

    thread = threading.Thread(target=outer)
    thread.start()
    entered.wait()
    names = [[frame.name for frame in stack] for stack in watchdog.stacks()]
    leave.set()
    thread.join()
    here = sys._getframe().f_code.co_name
    assert not any(here in stack for stack in names), "the thread that looks is left out"
    found = next(stack for stack in names if "inner" in stack)
    assert found.index("inner") + 1 == found.index("outer")


def test_the_reason_is_the_first_line_of_the_error_without_paths_and_advice():
    gloo = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5. This is typically caused by a"
    assert watchdog.reason(RuntimeError(gloo)) == "Connection closed by peer [::1]:5"
    assert watchdog.reason(RuntimeError("one.\ntwo")) == "one"
    assert watchdog.reason(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:5: Connection reset by peer."), True),
        (RuntimeError("[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (torch.distributed.DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 clients joined."), True),
        (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("gloo/transport/ is a folder"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_only_a_connection_that_broke_counts_as_a_lost_rank(error, lost):
    assert watchdog.lost_a_rank(error) is lost


def test_errors_of_other_kinds_pass_through_and_the_thread_ends_with_the_context():
    with pytest.raises(RuntimeError, match="shapes"), watchdog.Watchdog(600.0, rank=0):
        raise RuntimeError("shapes")
    deadline = time.monotonic() + 10
    while any(thread.name == "watchdog" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_a_run_may_take_longer_than_the_limit_while_it_gets_on():
    script = (
        "import time; from mode.training.safety.watchdog import Watchdog\n"
        "with Watchdog(1.0, 0) as dog:\n"
        "    for step in range(25): dog.progress(f'step {step}'); time.sleep(0.1)\n"
        "    dog.close(); time.sleep(1.5)"
    )
    process = launch.CONTEXT.Process(target=exec, args=(script, {}))
    process.start()
    process.join(60)
    assert process.exitcode == 0
