"""IsoFLOP analysis: trains a family of sizes of several variants at equal training FLOPs, fits the curves and draws the
paper's figure.

    python tools/isoflop.py --config ds_configs/moe.json ds_configs/mode.json --output runs/isoflop \\
        --budgets 5e12 2e13 --sizes 2x64 4x96 4x128 8x128,optimizer.params.lr=0.003

A size LAYERSxWIDTH changes the number of layers and the width of a configuration; heads keep their width, feed-forward
and experts their share of the model's width. Settings after a comma are for that size alone. Per budget and variant a
parabola in the logarithm of the size (--axis) is fitted to the counted losses of all finished runs, causal where depth-
routed; its lowest point is the optimum if it lies inside the family. What the optimum costs is interpolated between the
sizes. An optimum stands beside the baseline's optimum, a best member beside its best member; in the picture FLOPs per
forward pass are relative to the baseline's optimum, or to its best member where it has none.

Members run one after another, or --jobs at a time; the same command goes on where an earlier one stopped, and leaves
out what is finished. A member that fails is reported and does not stop the others.

Exit codes: 0; 1 when a member failed; 2 for wrong usage, or a directory of another experiment; 75 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from experiments.tool import Report, add_shared_options, conduct

from mode.tooling import positive_number

if TYPE_CHECKING:
    from comparing.tables import Table
    from experiments.members import Member
    from experiments.results import Results

PICTURE = "isoflop.png"
AXES = ("parameters", "active", "flops_per_token")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoflop.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_options(parser, PICTURE)
    parser.add_argument(
        "--budgets", nargs="+", type=positive_number, required=True, metavar="N", help="training FLOPs, such as 5e12"
    )
    parser.add_argument(
        "--sizes", nargs="+", required=True, metavar="LxW", help="LAYERSxWIDTH[,PATH=VALUE...]; a fit needs three"
    )
    parser.add_argument("--baseline", metavar="VARIANT", help="what others are relative to (default: the first)")
    parser.add_argument(
        "--axis",
        choices=AXES,
        default="parameters",
        help="the size that curves are fitted in: all parameters (default), those active per token, or forward FLOPs",
    )
    return parser


def plan(options: argparse.Namespace) -> list[Member]:
    from experiments.members import parse_size, parse_vary, plan_members

    from mode.config.section import ConfigError

    members = plan_members(
        options.config,
        vary=[parse_vary(text) for text in options.vary],
        settings=options.set,
        sizes=[parse_size(text) for text in options.sizes],
        budgets=options.budgets,
        seeds=options.seeds or [None],
        world_size=options.world_size,
    )
    labels = list(dict.fromkeys(member.label for member in members))
    if options.baseline is not None and options.baseline not in labels:
        raise ConfigError("--baseline", f"is {options.baseline}; it must be one of the variants: {', '.join(labels)}")
    options.baseline = options.baseline or labels[0]
    return members


def report(results: Results, options: argparse.Namespace) -> Report:
    from experiments.optima import curves, find_baseline, to_dict

    found = curves(results.points, options.axis)
    rows = [to_dict(curve, find_baseline(found, curve.budget, options.baseline)) for curve in found]
    figures = {"axis": options.axis, "baseline": options.baseline, "isoflop": rows}
    return Report(figures, [optima_table(rows)] if rows else [], findings(rows, results.unit))


def optima_table(rows: list[dict[str, Any]]) -> Table:
    from comparing.tables import Table
    from experiments.fitting import FEWEST_SIZES
    from experiments.members import show_budget

    cells = []
    for row in rows:
        for kind in ("optimum", "best"):
            item = row[kind]
            if item is None:
                continue
            relative = "-" if item["relative_flops"] is None else f"{item['relative_flops']:.3f}"
            beside = "-" if item["relative_loss"] is None else f"{item['relative_loss']:+.2%}"
            what = "fitted optimum" if kind == "optimum" else f"best member, {item['size']}"
            sizes = [f"{item[name]:,.0f}" for name in ("parameters", "active_parameters")]
            costs = [f"{item['flops_per_token']:.3e}", relative]
            cells.append(
                [row["label"], show_budget(row["budget"]), what, f"{item['loss']:.4f}", beside, *sizes, *costs]
            )
    header = ["variant", "budget", "what", "loss", "beside", "parameters", "active", "FLOPs/token", "relative"]
    about = (
        "beside, relative: loss and forward FLOPs; an optimum beside the baseline's, a best member beside its best one"
    )
    if any(row["fit"] is not None and row["fit"]["num_sizes"] == FEWEST_SIZES for row in rows):
        about += "; a parabola goes through any three sizes, so nothing tells how good such a fit is"
    return Table("optima", header, cells, about)


def findings(rows: list[dict[str, Any]], unit: str) -> list[str]:
    from experiments.members import show_budget

    lines = []
    for row in rows:
        where = f"{row['label']} at {show_budget(row['budget'])} FLOPs"
        if row["problem"] is not None:
            lines.append(f"{where}: {row['problem']}")
        cheapest = row["cheapest_as_good_as_baseline"]
        if cheapest is not None:
            lines.append(
                f"{where}: {cheapest['size']} reaches the loss of {cheapest['as_good_as']} "
                f"({cheapest['relative_loss']:+.2%}, {cheapest['loss']:.4f} {unit}) with "
                f"{cheapest['relative_flops']:.1%} of its FLOPs per forward pass; {cheapest['seeds']}"
            )
    return lines


def draw(results: Results, found: Report, options: argparse.Namespace, path: str) -> None:
    from experiments.isoflop_plot import draw_isoflop
    from experiments.optima import curves

    draw_isoflop(curves(results.points, options.axis), options.axis, options.baseline, results, path)


def main(command_line: list[str] | None = None) -> int:
    return conduct(build_parser().parse_args(command_line), plan, report, draw, PICTURE)


if __name__ == "__main__":
    sys.exit(main())
