"""What a configuration will cost, before anyone books a machine.

    python tools/plan.py ds_configs/mode.json --compare ds_configs/moe.json
    python tools/plan.py ds_configs/scale/mode_7b.json --world_size 64 --memory_gb 80

Prints capacities, routed tokens, parameters, FLOPs, bytes sent and memory per rank, all expected from the
configuration by `mode.accounting`; with --compare side by side with another file. It builds no model and
imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from typing import NoReturn

from planning.figures import Plan, make_plan
from planning.table import render

from mode.config.file import EngineConfig, RunConfig, load_run_config
from mode.config.section import ConfigError
from mode.tooling import EXIT_BAD_INPUT, add_set_option, complain, exit_code, positive_integer, positive_number


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        complain(message)
        self.exit(EXIT_BAD_INPUT)


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="plan.py",
        description="Capacities, parameters, FLOPs, bytes sent and memory per rank that a configuration will need.",
    )
    parser.add_argument("config", help="a DeepSpeed JSON file with a mode section, such as ds_configs/mode.json")
    parser.add_argument(
        "--compare", metavar="FILE", help="a second file to show side by side, with ratios first/second"
    )
    parser.add_argument(
        "--world_size",
        type=positive_integer,
        metavar="N",
        help="number of ranks (default: what the batch sizes imply, else the ep_size of the file)",
    )
    parser.add_argument("--ep_size", type=positive_integer, metavar="N", help="instead of mode.experts.ep_size")
    parser.add_argument(
        "--memory_gb", type=positive_number, metavar="X", help="warn when a rank needs more (GB of 10^9 bytes)"
    )
    add_set_option(parser, "; in both files, if there are two")
    parser.add_argument("--json", action="store_true", help="print exact figures as JSON")
    return parser


def load(file: str, arguments: argparse.Namespace) -> Plan:
    run = load_run_config(file, arguments.set)
    try:
        run = _with_ep_size(run, arguments.ep_size)
        ep_size = run.mode.experts.ep_size if run.mode.experts is not None else 1
        world_size = arguments.world_size or _implied_world_size(run.engine) or ep_size
        if world_size % ep_size:
            raise ConfigError(
                "mode.experts.ep_size",
                f"is {ep_size}, which does not divide the {world_size} ranks; "
                "use a --world_size that is a multiple of it, or another --ep_size",
            )
        plan = make_plan(file, run, world_size, arguments.memory_gb)
    except ConfigError as error:
        raise error.in_file(file) from None
    if arguments.ep_size is not None and run.mode.experts is None:
        plan["warnings"].append("--ep_size has no effect: there are no experts")
    return plan


def _with_ep_size(run: RunConfig, ep_size: int | None) -> RunConfig:
    experts = run.mode.experts
    if ep_size is None or experts is None:
        return run
    try:
        experts = dataclasses.replace(experts, ep_size=ep_size)
    except ConfigError as error:
        raise error.under("mode.experts") from None
    return dataclasses.replace(run, mode=dataclasses.replace(run.mode, experts=experts))


def _implied_world_size(engine: EngineConfig) -> int:
    """The number of ranks at which the three batch settings agree; 0 if they do not say."""
    micro, steps, batch = engine.micro_batch_size, engine.accumulation_steps, engine.train_batch_size
    return batch // (micro * steps) if micro and steps and batch else 0


def main() -> int:
    arguments = build_parser().parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a description may use letters the terminal lacks
    return exit_code(lambda: print_plans(arguments))


def print_plans(arguments: argparse.Namespace) -> int:
    plans = [load(file, arguments) for file in (arguments.config, arguments.compare) if file is not None]
    if arguments.json:
        print(json.dumps({"plan": plans[0], "compare": plans[1] if len(plans) == 2 else None}, indent=2))
    else:
        print(render(plans), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
