"""Members as processes, one after another: each in a run directory of its own, with a log, resumed where it stopped.

OUTPUT/<member>/              the run directory
OUTPUT/configs/<member>.json  the configuration it was started with
OUTPUT/logs/<member>.log      what it printed
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from experiments.members import Member
from mode.config_file import load_run_config
from mode.runs import NOT_THE_VARIANT, Run, RunError, read_run, tree_differences
from mode.section import ConfigError, show

TRAIN = Path(__file__).parent.parent.parent / "train.py"
ARGUMENTS = ("--deepspeed_config", "{config}", "--output_dir", "{output_dir}")
INTERRUPTED = 75  # as train.py returns it: the run can be resumed
LINE = 110  # of progress on a terminal

# What may change between the parts of a member's run without making it another one; the seed may not.
MAY_CHANGE = re.compile(
    r"mode\.train\.(log_every|save_every|keep_last|stop_after|monitor|watchdog_seconds)|mode\.experts\.(backend|ep_size)"
)


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
        return Outcome(member, None, "unfinished", str(error))
    if not run.finished:
        return Outcome(member, run, "unfinished", run.state)
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


class Signals:
    """Passes SIGINT and SIGTERM on to the running member, and remembers that no other is to be started."""

    def __init__(self) -> None:
        self.received = False
        self.process: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_members(
    members: Sequence[Member], output: Path, command: Sequence[str], own: bool
) -> tuple[list[Outcome], bool]:
    """Runs what is not finished, in order: (how every member stands, whether a signal ended it early).

    With `own` commands a member is done when its process is; others may hand it over to a queue.
    """
    for folder in ("configs", "logs"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    signals = Signals()
    outcomes = []
    with signals.installed():
        for number, member in enumerate(members, start=1):
            outcome, place = look(member, output), f"[{number}/{len(members)}] {member.name}"
            if outcome.finished:
                note(f"{place}: finished already")
            elif not signals.received:
                note(f"{place}: {member.cost.steps:,} steps, log {log_file(member, output)}")
                outcome = _run(member, output, command, own, signals)
                note(f"{place}: {outcome.text}")
            outcomes.append(outcome)
    if signals.received:
        note("interrupted; the same command goes on from here")
    return outcomes, signals.received


def log_file(member: Member, output: Path) -> Path:
    return output / "logs" / f"{member.name}.log"


def _run(member: Member, output: Path, command: Sequence[str], own: bool, signals: Signals) -> Outcome:
    config, log = output / "configs" / f"{member.name}.json", log_file(member, output)
    config.write_text(json.dumps(member.document, indent=2) + "\n", encoding="utf-8")
    named = {"{config}": str(config), "{output_dir}": str(output / member.name), "{name}": member.name}
    words = [_filled(word, named) for word in command]
    with log.open("ab") as file:
        start = file.tell()
        try:
            signals.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        except OSError as error:
            return Outcome(member, None, "failed", f"{words[0]} cannot be started: {error.strerror or error}")
        if signals.received:  # between the last look and the start
            signals.process.terminate()
        code = _wait(signals.process, log, start)
        signals.process = None
    outcome = look(member, output)
    if outcome.finished and code == 0:
        return outcome
    if code == INTERRUPTED or (signals.received and code != 0):
        where = f"at step {outcome.run.last['step']:.0f}" if outcome.run is not None else "before its first evaluation"
        return Outcome(member, outcome.run, "interrupted", f"{where}; it can be resumed")
    if code != 0:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(member, outcome.run, "failed", f"{how}: {last_error(log, start)} (log: {log})")
    if not own:
        return Outcome(member, outcome.run, "handed over", outcome.problem)
    if member.run.mode.train.stop_after is not None:
        return outcome
    folder = output / member.name
    return Outcome(
        member, outcome.run, "failed", f"its process ended well, but {outcome.text}; delete {folder} to run it again"
    )


def _filled(word: str, named: dict[str, str]) -> str:
    for placeholder, value in named.items():
        word = word.replace(placeholder, value)
    return word


def _wait(process: subprocess.Popen[bytes], log: Path, start: int) -> int:
    on_terminal = sys.stderr.isatty()
    while True:
        try:
            code = process.wait(timeout=1)
            break
        except subprocess.TimeoutExpired:
            lines = _lines(log, start) if on_terminal else []
            if lines:
                print(f"\r  {lines[-1][:LINE]:<{LINE}}", end="", file=sys.stderr, flush=True)
    if on_terminal:
        print(f"\r{'':<{LINE + 2}}\r", end="", file=sys.stderr, flush=True)
    return code


def _lines(log: Path, start: int, most: int = 20_000) -> list[str]:
    """The last lines that are not empty, of what was logged from `start` on."""
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - most))
        text = file.read().decode("utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def last_error(log: Path, start: int = 0) -> str:
    lines = _lines(log, start)
    errors = [line for line in lines if re.match(r"(\w+(\.\w+)*)?error\b", line, re.IGNORECASE)]
    return (errors or lines or ["it printed nothing"])[-1]


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
