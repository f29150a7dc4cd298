"""The command line and the course of an experiment: plan, run what is not finished, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mode.tooling import add_set_option, exit_code, positive_integer, positive_number, whole_number

if TYPE_CHECKING:
    from comparing.tables import Table

    from experiments.members import Member
    from experiments.results import Results
    from experiments.running import Outcome


@dataclass(frozen=True)
class Report:
    """What a tool makes of the results."""

    figures: dict[str, Any]
    tables: list[Table]
    lines: list[str]  # in words


def add_shared_options(parser: argparse.ArgumentParser, picture: str) -> None:
    parser.add_argument(
        "--config", nargs="+", required=True, metavar="FILE", help="configuration files, such as ds_configs/moe.json"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="[NAME:]PATH=V,V,...",
        help="values a setting takes in turn, in every configuration or in NAME alone (its file's name; several with "
        "commas); given again, all combinations",
    )
    add_set_option(parser, "; in all members")
    parser.add_argument(
        "--seeds", nargs="+", type=whole_number, metavar="N", help="a member for each (default: mode.seed of the files)"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="where the run directories go, or are")
    parser.add_argument("--plan", "--dry_run", action="store_true", help="print the members and what they cost; exit")
    parser.add_argument(
        "--flops_per_second",
        type=positive_number,
        metavar="N",
        help="what one member trains with, for the times of --plan (default: as members in --output have logged, or "
        "else measured by some steps on this machine)",
    )
    parser.add_argument("--report", action="store_true", help="train nothing, report on what is there")
    parser.add_argument(
        "--command",
        metavar="TEMPLATE",
        help='what runs a member, with {config}, {output_dir} and {name} in it, for example "sbatch docs/slurm.sbatch '
        '--deepspeed_config {config} --output_dir {output_dir}"; default: train.py as one process. Members that it '
        "only queues are reported on by --report",
    )
    parser.add_argument(
        "--jobs",
        type=positive_integer,
        default=1,
        metavar="N",
        help="members trained at a time, each on its share of the cores (default: 1). Small models leave cores idle: "
        "on 2 cores, 2 single-threaded runs do up to 1.8 times the work of one on both",
    )
    parser.add_argument(
        "--world_size",
        type=positive_integer,
        default=1,
        metavar="N",
        help="ranks of a member, for the plan (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", metavar="FILE", help="write the report there as Markdown")
    parser.add_argument("--plot", metavar="FILE", help=f"a .png, .pdf or .svg file (default: {picture} in --output)")


def conduct(
    options: argparse.Namespace,
    plan: Callable[[argparse.Namespace], list[Member]],
    report: Callable[[Results, argparse.Namespace], Report],
    draw: Callable[[Results, Report, argparse.Namespace, str], None],
    picture: str,
) -> int:
    """Exit code 0; 1 when a member failed; 75 when interrupted; 2 and 4 as of `exit_code`."""
    return exit_code(lambda: _conduct(options, plan, report, draw, picture))


def _conduct(
    options: argparse.Namespace,
    plan: Callable[[argparse.Namespace], list[Member]],
    report: Callable[[Results, argparse.Namespace], Report],
    draw: Callable[[Results, Report, argparse.Namespace, str], None],
    picture: str,
) -> int:
    from experiments.members import missed_budgets, unequal_flops
    from experiments.results import gather
    from experiments.running import INTERRUPTED

    members = _members(options, plan)
    warnings = [*missed_budgets(members, options.world_size), *unequal_flops(members)]
    outcomes, interrupted = _outcomes(options, members, warnings)
    if options.plan:
        _print_plan(outcomes, options)
        return 0
    results = gather(outcomes, warnings)
    found = report(results, options)
    written = _draw(options, results, found, draw, picture)
    if options.write:
        near = None if written is None else os.path.relpath(written, Path(options.write).parent)
        Path(options.write).write_text(render(results, found, near, markdown=True) + "\n", encoding="utf-8")
    figures = {**results.to_dict(), **found.figures, "plot": written}
    print(json.dumps(figures, indent=2) if options.json else render(results, found, written, markdown=False))
    states = {outcome.state for outcome in outcomes}
    if interrupted or "interrupted" in states:
        return INTERRUPTED
    return 1 if "failed" in states else 0


def _members(options: argparse.Namespace, plan: Callable[[argparse.Namespace], list[Member]]) -> list[Member]:
    from experiments.running import check_unchanged
    from mode.config.section import ConfigError

    output = Path(options.output)
    if options.plot and Path(options.plot).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigError("--plot", f"is {options.plot}; it must end in .png, .pdf or .svg")
    if options.plan and options.report:
        raise ConfigError("--plan", "and --report exclude each other")
    if options.report and not output.is_dir():
        raise ConfigError("--output", f"{output} is no directory; --report needs what the tool wrote without it")
    members = plan(options)
    for member in members:
        check_unchanged(member, output)
    return members


def _outcomes(
    options: argparse.Namespace, members: Sequence[Member], warnings: Sequence[str]
) -> tuple[list[Outcome], bool]:
    from experiments.running import Runner, look, parse_command

    output, command = Path(options.output), parse_command(options.command)
    if options.report:
        return [look(member, output) for member in members], False
    for warning in warnings:  # before hours of training, and again in the report
        print(f"warning: {warning}", file=sys.stderr)
    if options.plan:
        return [look(member, output) for member in members], False
    runner = Runner(output, command, own=options.command is None, jobs=options.jobs)
    return runner.run(members), runner.interrupted


def _print_plan(outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    from experiments.results import plan_table
    from experiments.speed import find_speed

    here = options.command is None and options.world_size == 1
    speed = find_speed(outcomes, options.flops_per_second, here, options.jobs)
    if not options.json:
        print(plan_table(outcomes, speed, options.jobs).text())
        return
    members = [
        {**item.member.to_dict(), "state": item.state, "seconds": speed.seconds(item), "estimated": not item.finished}
        for item in outcomes
    ]
    left = speed.seconds_left(outcomes, options.jobs)
    print(json.dumps({**asdict(speed), "seconds_left": left, "members": members}, indent=2))


def _draw(
    options: argparse.Namespace,
    results: Results,
    found: Report,
    draw: Callable[[Results, Report, argparse.Namespace, str], None],
    picture: str,
) -> str | None:
    """The picture's path, if there is one."""
    if not results.points:
        return None
    path = options.plot or str(Path(options.output) / picture)
    try:
        draw(results, found, options, path)
    except ModuleNotFoundError as error:
        print(f"warning: no picture: it needs {error.name}: pip install -e '.[plots]'", file=sys.stderr)
        return None
    return path


def render(results: Results, found: Report, picture: str | None, markdown: bool) -> str:
    from comparing.tables import wrap

    from experiments.results import points_table, troubles

    parts = [f"**WARNING**: {text}" if markdown else wrap(f"WARNING: {text}") for text in results.warnings]
    tables = [points_table(results), *found.tables] if results.points else []
    parts += [table.markdown() if markdown else table.text() for table in tables]
    sections = {"findings": found.lines, "not finished": troubles(results)}
    for title, lines in sections.items():
        if lines:
            heading = f"### {title.capitalize()}\n\n" if markdown else f"{title}\n"
            parts.append(heading + "\n".join(f"- {line}" if markdown else wrap(line) for line in lines))
    if picture is not None:
        parts.append(f"![{Path(picture).stem}]({quote(picture)})" if markdown else f"picture: {picture}")
    return "\n\n".join(parts)
