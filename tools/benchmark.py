"""Measures this package beside what its users run today, side by side in one run.

    python tools/benchmark.py layer       one expert layer, its peers, and a dense one of equal FLOPs
    python tools/benchmark.py step        a training step: do skipped FLOPs become saved time?
    python tools/benchmark.py profile     where the time of a step goes
    python tools/benchmark.py memory      the peak of a training step
    python tools/benchmark.py dispatch    expert parallelism: bytes sent and time, 2 and 4 ranks
    python tools/benchmark.py decode      sampling with the cache: tokens per second

The contenders take turns, many times over, so that a busy machine slows all of them alike. A time is the
median of the repeats; a ratio is the median of the ratios within a turn, with the middle half of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

TURNS, PROCESSES = 20, 3  # what --repeats is unless it is given; a process for each peak of memory
COMMANDS = {
    "layer": "one expert layer beside its peers and the dense limit; --grow: with more tokens and experts",
    "step": "a training step of MoE and MoDE models, and a depth-routed block beside a full one",
    "profile": "where the time of a training step goes; --plot draws it",
    "memory": "the peak memory of a training step",
    "dispatch": "expert parallelism beside deepspeed.moe.layer.MoE",
    "decode": "sampling with the cache, models with and without routing",
}


def main(arguments: list[str] | None = None) -> int:
    from mode.host import keep_freed_memory, share_the_cores

    share_the_cores()  # as training does, and before torch is imported
    keep_freed_memory()
    from mode.tooling import EXIT_IO, output_for_figures_alone, whole_number

    with output_for_figures_alone():
        from benchmarks import decode, dispatch, layer, memory, profile, step
    from mode.config.section import ConfigError

    modules = {
        **{"layer": layer, "step": step, "profile": profile},
        **{"memory": memory, "dispatch": dispatch, "decode": decode},
    }

    def spread(text: str) -> int:
        return whole_number(text, least=2)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=modules[name].__doc__)
        modules[name].add_arguments(command)
        repeats = PROCESSES if name == "memory" else TURNS
        command.add_argument(
            "--repeats", type=spread, default=repeats, help=f"turns that count, at least 2 (default: {repeats})"
        )
        command.add_argument("--json", action="store_true", help="print the figures as JSON")
        command.add_argument("--write", metavar="FILE", help="write the table there as Markdown")
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    try:
        with output_for_figures_alone():
            figures = modules[options.command].measure(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before all turns were over; nothing is printed of a part of them", file=sys.stderr)
        return 130
    text = modules[options.command].table(figures)
    print(json.dumps(figures, indent=1) if options.json else text)
    try:
        if options.write:
            Path(options.write).write_text(text + "\n")
        if getattr(options, "plot", None):
            profile.draw(figures, options.plot)
    except OSError as error:  # what was measured is printed above
        print(f"error: {error}; name another --write or --plot", file=sys.stderr)
        return EXIT_IO
    return 0


def check_outputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What cannot be written is refused before anything is measured."""
    plot = getattr(options, "plot", None)
    for name, path in (("--write", options.write), ("--plot", plot)):
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            parser.error(f"{name}: is {path}, which is a folder or in none; name a file in a folder that exists")
        if path is not None and not may_write(Path(path)):
            parser.error(f"{name}: is {path}, which cannot be written; name another file")
    if plot is not None and Path(plot).suffix != ".png":
        parser.error(f"--plot: is {plot}; name a file that ends in .png")
    if plot is not None and find_spec("matplotlib") is None:
        parser.error('--plot: needs matplotlib; pip install -e ".[plots]"')


def may_write(path: Path) -> bool:
    """By trying: root may, whatever the permissions say, and not everywhere."""
    there = path.exists()
    try:
        path.open("a").close()
    except OSError:
        return False
    if not there:
        path.unlink()
    return True


if __name__ == "__main__":
    sys.exit(main())
