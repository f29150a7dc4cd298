"""What command-line tools share: arguments, and the end: figures as text or JSON, or one line of error."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


def print_figures(make: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any]], str], as_json: bool) -> int:
    """The exit code: 0, 2 for wrong input, 4 where reading or writing failed."""
    from mode.data import DataError
    from mode.section import ConfigError

    try:
        figures = make()
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: reading or writing failed: {error}", file=sys.stderr)
        return 4
    print(json.dumps(figures, indent=2) if as_json else render(figures))
    return 0


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
