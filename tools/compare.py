"""Runs side by side at equal steps, tokens, training FLOPs and training time.

    python tools/compare.py runs/moe runs/mode
    python tools/compare.py runs --plot curves.png --write comparison.md
    python tools/compare.py runs/before runs/after --assert_equal
    python tools/compare.py runs --assert_better mode moe --by 0.01

Runs whose configurations differ only in seeds, names and directories are seeds of one variant and are averaged. The
loss that counts is the validation loss, and of depth-routed models the causal one (loss/val_causal): top-k routing sees
the future. Between evaluations the loss is interpolated, linearly in the logarithm of the axis; beyond them there is no
number. Training time is the sum of the logged step times: no pause, no evaluation, no saving.

"better" and "worse", in the report and for --assert_better, need comparable runs that are equally far through their
schedules and a difference outside the seeds' spread, or with one seed one of at least --by; else there is no verdict.

Exit codes: 0, also when an assertion holds; 1 when one fails; 2 for wrong usage, or runs that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mode.runs import Run, Variant

AXIS_OPTIONS = {"flops": "flops", "tokens": "tokens", "steps": "steps", "time": "seconds"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run directory, or a directory that holds some")
    parser.add_argument(
        "--at",
        choices=AXIS_OPTIONS,
        default="flops",
        help="what is equal in the verdict and --assert_better (default: flops)",
    )
    parser.add_argument(
        "--baseline", metavar="A", help="the variant that verdicts compare with (default: the first with finite losses)"
    )
    parser.add_argument("--points", type=int, default=4, metavar="N", help="matched points per axis (default: 4)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the report as Markdown")
    parser.add_argument("--write", metavar="FILE", help="write the report there as Markdown")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses against FLOPs and time (.png, .pdf or .svg)")
    parser.add_argument("--assert_equal", action="store_true", help="fail unless all runs have the same loss/* curves")
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="for --assert_equal: how far losses may be apart (default: 0)"
    )
    parser.add_argument(
        "--assert_better",
        nargs=2,
        metavar=("A", "B"),
        help="fail unless the verdict on A against B is better, and by at least --by; each a variant's label or a run "
        "directory",
    )
    parser.add_argument(
        "--by",
        type=float,
        metavar="SHARE",
        help="for --assert_better: a share, 0.01 is 1 %%; needed where there is one seed and so no spread (default: 0)",
    )
    return parser


def check_usage(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.runs and not options.assert_better:
        parser.error("no RUN given; name run directories")
    if options.points < 1:
        parser.error(f"--points is {options.points}; it must be at least 1")
    if options.tolerance is not None and not (options.assert_equal and 0 <= options.tolerance < math.inf):
        parser.error(f"--tolerance is {options.tolerance:g}; it must be at least 0, and goes with --assert_equal")
    if options.by is not None and not (options.assert_better and 0 <= options.by < 1):
        parser.error(f"--by is {options.by:g}; it must be a share from 0 to below 1, and goes with --assert_better")
    if options.plot and Path(options.plot).suffix.lower() not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot is {options.plot}; it must end in .png, .pdf or .svg")
    if options.json and options.markdown:
        parser.error("--json and --markdown exclude each other; --write FILE writes Markdown beside either")


def read_all(paths: Sequence[str], warnings: list[str]) -> dict[Path, Run]:
    """By resolved directory. A run in a directory of runs that cannot be read is passed over with a warning."""
    from mode.runs import RunError, find_runs, read_run

    runs: dict[Path, Run] = {}
    for path in paths:
        folders = find_runs(path)
        found = {}
        for folder in folders:
            try:
                found[folder.resolve()] = read_run(folder)
            except RunError as error:
                if folder == Path(path):
                    raise
                warnings.append(f"passed over: {error}")
        if not found:
            raise RunError(path, f"holds no run that can be read. {warnings[-len(folders)]}")
        runs |= found
    return runs


def find_variant(name: str, variants: Sequence[Variant], option: str) -> Variant:
    """By label, or by the run directory, or directory of runs, that it names."""
    from mode.runs import RunError, Variant, find_runs

    for variant in variants:
        if variant.label == name:
            return variant
    folders = [folder.resolve() for folder in find_runs(name)]
    runs = [(run, variant) for variant in variants for run in variant.runs if run.directory.resolve() in folders]
    if not runs:
        known = ", ".join(variant.label for variant in variants)
        raise RunError(name, f"{option} names neither a run directory nor one of the variants: {known}")
    if any(variant is not runs[0][1] for _, variant in runs):
        raise RunError(name, f"{option} must name one variant, but this directory holds runs of several")
    chosen = tuple(run for run, _ in runs)
    return runs[0][1] if chosen == runs[0][1].runs else Variant(name, chosen)


def default_baseline(variants: Sequence[Variant]) -> Variant:
    """The first that anything can be compared with."""
    usable = (variant for variant in variants if all(len(run.counted.loss) for run in variant.runs))
    return next(usable, variants[0])


def report(options: argparse.Namespace) -> tuple[dict[str, Any], list[Variant]]:
    """The figures to print, assertions included."""
    from comparing import assertions, figures

    from mode.runs import RunError, group_runs

    warnings: list[str] = []
    runs = read_all(options.runs, warnings)
    labels = {variant.label for variant in group_runs(runs.values())}  # first: a folder may be called like a variant
    named = [name for name in options.assert_better or [] if name not in labels and Path(name).is_dir()]
    runs |= read_all(named, warnings)
    variants = group_runs(runs.values())
    axis = AXIS_OPTIONS[options.at]
    baseline = (
        find_variant(options.baseline, variants, "--baseline") if options.baseline else default_baseline(variants)
    )
    found = figures.compare(variants, baseline, axis, options.points, options.by or 0.0)
    found["warnings"] += warnings
    found["assertions"] = []
    if options.assert_equal:
        if len(runs) < 2:
            raise RunError(next(iter(runs)), "--assert_equal needs at least two runs")
        found["assertions"].append(assertions.equal(list(runs.values()), options.tolerance or 0.0))
    if options.assert_better:
        pair = [find_variant(name, variants, "--assert_better") for name in options.assert_better]
        found["assertions"].append(assertions.better(*pair, options.by or 0.0, axis))
    return found, variants


def main(command_line: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(command_line)
    check_usage(parser, options)
    from comparing.comparable import judge
    from comparing.tables import render

    from mode.runs import RunError
    from mode.tooling import EXIT_IO

    try:
        found, variants = report(options)
        if options.plot:
            from comparing.plot import draw

            draw(variants, judge([run for variant in variants for run in variant.runs]), options.plot)
        if options.write:
            Path(options.write).write_text(render(found, markdown=True) + "\n", encoding="utf-8")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: --plot needs {error.name}: pip install -e '.[plots]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: reading or writing failed: {error}", file=sys.stderr)
        return EXIT_IO
    print(json.dumps(found, indent=2) if options.json else render(found, options.markdown))
    for warning in found["warnings"] if options.json else []:
        print(f"warning: {warning}", file=sys.stderr)
    failed = [item for item in found["assertions"] if not item["holds"]]
    for item in failed:
        print(f"assert_{item['assert']} failed: {item['text']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
