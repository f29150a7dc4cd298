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
from pathlib import Path

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
    from benchmarks import decode, dispatch, layer, memory, profile, step

    modules = {
        **{"layer": layer, "step": step, "profile": profile},
        **{"memory": memory, "dispatch": dispatch, "decode": decode},
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=modules[name].__doc__)
        modules[name].add_arguments(command)
        command.add_argument("--repeats", type=int, default=20, help="turns that count (default: 20)")
        command.add_argument("--json", action="store_true", help="print the figures as JSON")
        command.add_argument("--write", metavar="FILE", help="write the table there as Markdown")
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error(f"--repeats is {options.repeats}; a spread needs at least 2")
    figures = modules[options.command].measure(options)
    text = modules[options.command].table(figures)
    print(json.dumps(figures, indent=1) if options.json else text)
    if options.write:
        Path(options.write).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
