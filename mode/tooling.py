"""What command-line tools share: arguments, exit codes, and the end: figures as text or JSON, or one line of error."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mode.config.section import InputError

EXIT_BAD_INPUT, EXIT_IO = 2, 4  # as those of train.py


def whole_number(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a whole number of at least {least}")
    return int(text)


def positive_integer(text: str) -> int:
    return whole_number(text, least=1)


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a number above 0")
    return value


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option --device; `choose_device` says which one is meant where it is not given."""
    parser.add_argument(
        "--device", help="what runs the model, such as cpu (default: cuda where there is one, else cpu)"
    )


def choose_device(given: str | None) -> str:
    import torch

    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def add_set_option(parser: argparse.ArgumentParser, where: str = "") -> None:
    """`--set`, for every command that takes a configuration file; `load_run_config` puts the settings in place."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override any value of the JSON by its dotted path, such as --set mode.train.stop_after=20; repeatable"
        + where,
    )


def exit_code(work: Callable[[], int]) -> int:
    """What `work` returns; 2 for wrong input and 4 where reading or writing failed, with one line of error."""
    try:
        code = work()
        sys.stdout.flush()  # what cannot be written is to be known here
    except InputError as error:
        complain(str(error))
        return EXIT_BAD_INPUT
    except OSError as error:
        _discard_output()
        if not isinstance(error, BrokenPipeError):  # else nobody is left to read
            complain(f"reading or writing failed: {error}")
        return EXIT_IO
    return code


def complain(message: str) -> None:
    """One line on stderr, whatever line breaks a file name or a JSON key brings along."""
    print("error: " + " ".join(message.splitlines()), file=sys.stderr)


def _discard_output() -> None:
    """Sends what stdout still holds, if it cannot be written, nowhere: Python would try again at exit and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_figures(make: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any]], str], as_json: bool) -> int:
    """Prints what `make` gives. The exit code: see `exit_code`."""

    def work() -> int:
        figures = make()
        print(json.dumps(figures, indent=2) if as_json else render(figures))
        return 0

    return exit_code(work)


@contextmanager
def output_for_figures_alone() -> Iterator[None]:
    """What libraries print meanwhile, also in processes of their own, goes to the errors: DeepSpeed says hello."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
