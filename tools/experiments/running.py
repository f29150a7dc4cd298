"""Members as processes: each in a run directory of its own, with a log, resumed where it stopped.

OUTPUT/<member>/              the run directory
OUTPUT/configs/<member>.json  the configuration it was started with
OUTPUT/logs/<member>.log      what it printed
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from experiments.members import Member
from mode.config.file import load_run_config
from mode.config.section import ConfigError, show
from mode.host import num_cores
from mode.runs import NOT_THE_VARIANT, Run, RunError, read_run, tree_differences

TRAIN = Path(__file__).parent.parent.parent / "train.py"
ARGUMENTS = ("--deepspeed_config", "{config}", "--output_dir", "{output_dir}")
INTERRUPTED = 75  # as train.py returns it: the run can be resumed
LINE = 110  # of progress on a terminal
PAUSE = 0.1  # seconds between two looks at what runs

# What may change, beside what makes no other variant, between the parts of a member's run; the seed may not.
MAY_CHANGE = re.compile(r"mode\.experts\.(backend|ep_size)")


@dataclass(frozen=True)
class Outcome:
    """How things stand with a member."""

    member: Member
    run: Run | None  # what it has logged, if that can be read
    state: str  # finished, not started, unfinished, handed over, failed, interrupted
    problem: str = ""

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def text(self) -> str:
        return f"{self.state}: {self.problem}" if self.problem else self.state


def look(member: Member, output: Path) -> Outcome:
    """By what the run directory holds."""
    folder = output / member.name
    if not folder.exists():
        return Outcome(member, None, "not started")
    try:
        run = read_run(folder)
    except RunError as error:
        return Outcome(member, None, "unfinished", f"{error}{_end_of_log(member, output)}")
    if not run.finished:
        return Outcome(member, run, "unfinished", f"{run.state}{_end_of_log(member, output)}")
    step = run.diverged_at(run.loss_tag)
    if step is not None:
        return Outcome(member, run, "failed", f"its loss is not finite from step {step} on")
    return Outcome(member, run, "finished")


def check_unchanged(member: Member, output: Path) -> None:
    """A directory whose run had other settings is refused: train.py would go on with it as if it were this one."""
    folder = output / member.name
    if not (folder / "config.json").is_file():
        return
    try:
        before = load_run_config(folder / "config.json")
    except ConfigError as error:
        if error.path == "file":  # damaged: the run writes it anew
            return
        raise RunError(
            folder,
            f"config.json does not fit this version of mode: {error.path}: {error.problem}. Use another --output, "
            "or go on with the version that wrote it",
        ) from None
    trees = {
        name: {**run.deepspeed, "mode": run.mode.to_dict()} for name, run in (("now", member.run), ("then", before))
    }
    for path, values in tree_differences(trees):
        harmless = MAY_CHANGE.fullmatch(path) or (NOT_THE_VARIANT.fullmatch(path) and path != "mode.seed")
        if not harmless:
            raise RunError(
                folder,
                f"{path} was {show(values['then'])} in the run that is there and is {show(values['now'])} now; set it "
                "back, use another --output, or delete the directory",
            )


# ---------------------------------------------------------------------------------------------------
# Running


def parse_command(template: str | None) -> list[str]:
    if template is None:
        return [sys.executable, str(TRAIN), *ARGUMENTS]
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise ConfigError("--command", f"is {show(template)}, which a shell could not read: {error}") from None
    if not all(any(name in part for part in parts) for name in ("{config}", "{output_dir}")):
        example = " ".join(("deepspeed", "--num_gpus", "8", "train.py", *ARGUMENTS))
        raise ConfigError("--command", f'is {show(template)}; it must name {{config}} and {{output_dir}}: "{example}"')
    return parts


@dataclass(frozen=True)
class Started:
    member: Member
    place: str  # among the others
    process: subprocess.Popen[bytes]
    log_start: int  # where its log file ended before


class Runner:
    """Runs members, `jobs` at a time. SIGINT and SIGTERM are passed on to those that run, and no other is started.

    With `own` commands a member is done when its process is; others may hand it over to a queue.
    """

    def __init__(self, output: Path, command: Sequence[str], own: bool, jobs: int) -> None:
        self.output, self.command, self.own, self.jobs = output, command, own, jobs
        self.running: list[Started] = []
        self.interrupted = False

    def run(self, members: Sequence[Member]) -> list[Outcome]:
        """What is not finished, in order: how every member stands."""
        for folder in ("configs", "logs"):
            (self.output / folder).mkdir(parents=True, exist_ok=True)
        outcomes = {member.name: look(member, self.output) for member in members}
        waiting = deque(enumerate(members, start=1))
        with self._signals():
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    number, member = waiting.popleft()
                    place = f"[{number}/{len(members)}] {member.name}"
                    if outcomes[member.name].finished:
                        note(f"{place}: finished already")
                    elif not self.interrupted:
                        outcomes[member.name] = self._start(member, place)
                for started in [item for item in self.running if item.process.poll() is not None]:
                    self.running.remove(started)
                    outcome = outcomes[started.member.name] = self._ended(started)
                    note(f"{started.place}: {outcome.text}")
                self._show_progress()
                time.sleep(PAUSE)
        if self.interrupted:
            note("interrupted; the same command goes on from here")
        return list(outcomes.values())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def receive(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            for started in self.running:
                if started.process.poll() is None:
                    started.process.send_signal(number)

        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, member: Member, place: str) -> Outcome:
        """How the member stands if it never ends."""
        config, log = self.output / "configs" / f"{member.name}.json", log_file(member, self.output)
        note(f"{place}: {member.cost.steps:,} steps, log {log}")
        config.write_text(json.dumps(member.document, indent=2) + "\n", encoding="utf-8")
        named = {"{config}": str(config), "{output_dir}": str(self.output / member.name), "{name}": member.name}
        words = [_filled(word, named) for word in self.command]
        with log.open("ab") as file:
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment(self.jobs)
                )
            except OSError as error:
                problem = f"{words[0]} cannot be started: {error.strerror or error}"
                note(f"{place}: failed: {problem}")
                return Outcome(member, None, "failed", problem)
            self.running.append(Started(member, place, process, file.tell()))
        if self.interrupted:  # between the last look and the start
            process.terminate()
        return look(member, self.output)

    def _ended(self, started: Started) -> Outcome:
        member, code = started.member, started.process.returncode
        outcome, log = look(member, self.output), log_file(member, self.output)
        if outcome.finished and code == 0:
            return outcome
        if code == INTERRUPTED or (self.interrupted and code != 0):
            run = outcome.run
            logged = f"after its last logged step, {run.last['step']:.0f}" if run is not None else ""
            where = logged or "before its first evaluation"
            return Outcome(member, run, "interrupted", f"{where}; it can be resumed")
        if code != 0:
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            return Outcome(member, outcome.run, "failed", f"{how}: {last_error(log, started.log_start)} (log: {log})")
        if not self.own:
            return Outcome(member, outcome.run, "handed over", outcome.problem)
        if member.run.mode.train.stop_after is not None:
            return outcome
        folder = self.output / member.name
        problem = f"its process ended well, but {outcome.text}; delete {folder} to run it again"
        return Outcome(member, outcome.run, "failed", problem)

    def _show_progress(self) -> None:
        """The last line of every running member's log, side by side, on a terminal."""
        if not sys.stderr.isatty() or not self.running:
            return
        width = LINE // len(self.running)
        logs = [_lines(log_file(started.member, self.output), started.log_start) for started in self.running]
        text = "".join(f"{lines[-1][: width - 2]:<{width}}" for lines in logs if lines)
        print(f"\r  {text:<{LINE}}\r", end="", file=sys.stderr, flush=True)


def log_file(member: Member, output: Path) -> Path:
    return output / "logs" / f"{member.name}.log"


def environment(jobs: int) -> dict[str, str]:
    """Members side by side share the cores, unless the user chose."""
    threads = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, num_cores() // jobs))}
    return {**threads, **os.environ}


def _filled(word: str, named: dict[str, str]) -> str:
    for placeholder, value in named.items():
        word = word.replace(placeholder, value)
    return word


def _lines(log: Path, start: int, most: int = 20_000) -> list[str]:
    """The last lines that are not empty, of what was logged from `start` on."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - most))
        text = file.read().decode("utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


ERROR = re.compile(r"(\w+(\.\w+)*)?error\b", re.IGNORECASE)  # at the start of a line
END_OF_LOG = 5  # lines


def last_error(log: Path, start: int = 0) -> str:
    return last_error_of(_lines(log, start))


def last_error_of(lines: list[str]) -> str:
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or lines or ["it printed nothing"])[-1]


def _end_of_log(member: Member, output: Path) -> str:
    """The error that a member's log ends with, if it does: whoever only reports has nothing else to tell failure by."""
    log = log_file(member, output)
    errors = [line for line in _lines(log, 0)[-END_OF_LOG:] if ERROR.match(line)] if log.is_file() else []
    return f"; its log ends with: {errors[-1]} (log: {log})" if errors else ""


def note(text: str) -> None:
    line = f"{time.strftime('%H:%M:%S')}  {text}"
    print(f"{line:<{LINE + 2}}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
