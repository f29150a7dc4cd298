"""The numbers of a report as text."""

from __future__ import annotations

from typing import Any

from mode.training.logging.console import table

NAMES = {"top_k": "top-k", "predictor": "predictor", "router": "router logit"}


def render(report: dict[str, Any]) -> str:
    parts = [table(_summary(report)), _depth(report), _experts(report), _attention(report)]
    return "\n\n".join(part for part in parts if part)


def _summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("model", report["name"]),
        ("text", f"{report['sequences']} held-out sequences of {report['sequence_length']} tokens"),
    ]
    depth, leaked = report["depth"], report["leak"]
    if depth is None:
        rows.append(("loss", f"{report['loss']['top_k']:.4f} nats per token"))
    else:
        rows.append(("shown", f"decisions by {NAMES[report['shown']]}"))
        for name, loss in report["loss"].items():
            rows.append(
                (f"loss, {NAMES[name]}", f"{loss:.4f} nats per token" + ", sees the future" * (name == "top_k"))
            )
        if depth["above_half"] is not None:
            share, capacity = depth["above_half"], depth["capacity_fraction"]
            rows.append(("router weights", f"{share:.1%} above 0.5 (capacity {capacity:.1%})"))
    names = {"blocks": "blocks entered", "real_choices": "real choices"}
    for name, relation in report["entropy"]["by"].items():
        value = relation["rank_correlation"]
        shown = "undefined: always the same number" if value is None else f"{value:+.3f}"
        rows.append((f"rank correlation of {names[name]} with entropy", f"{shown} over {relation['tokens']:,} tokens"))
    spent = report["flops_per_token"]
    rows.append(("forward FLOPs per token", f"{spent['mean']:.4g} ({spent['min']:.4g} to {spent['max']:.4g})"))
    if leaked is not None:
        error = leaked["standard_error"]
        spread = "" if error is None else f" +- {error:.4f}"
        causal = ", ".join(f"{NAMES[name]} {loss:.4f}" for name, loss in leaked["causal_full"].items())
        number = f"{len(leaked['positions'])} positions of {leaked['sequences']} sequences"
        rows += [
            ("leak of top-k routing", f"{leaked['leak']:+.4f}{spread} nats per token, at {number}"),
            ("  loss there", f"whole {leaked['top_k_full']:.4f}, prefix {leaked['top_k_prefix']:.4f}, {causal}"),
        ]
    rows.append(("written to", report["output"]))
    if report["tensorboard"] is not None:
        rows.append(("for TensorBoard", report["tensorboard"]))
    return rows


def _depth(report: dict[str, Any]) -> str:
    if report["depth"] is None or not report["depth"]["blocks"]:
        return ""
    header = ["block", *(f"kept, {NAMES[name]}" for name in report["loss"])]
    header += ["router weight above 0.5", "best threshold agrees with top-k"]
    cells = [
        [
            layer,
            *(f"{share:.1%}" for share in block["kept"].values()),
            f"{block['above_half']:.1%}",
            f"{block['best_threshold']['agrees']:.1%}",
        ]
        for layer, block in report["depth"]["blocks"].items()
    ]
    return _columns(header, cells)


def _experts(report: dict[str, Any]) -> str:
    if report["experts"] is None:
        return ""
    header = ["block", "real choices", "no-op choices", "mean gate", "load imbalance (max/mean)"]
    cells = [
        [
            layer,
            f"{1 - block['no_op_share']:.1%}",
            f"{block['no_op_share']:.1%}",
            "-" if block["mean_gate"] is None else f"{block['mean_gate']:.3f}",
            "-" if block["imbalance"] is None else f"{block['imbalance']:.2f}",
        ]
        for layer, block in report["experts"]["blocks"].items()
    ]
    return _columns(header, cells)


def _attention(report: dict[str, Any]) -> str:
    header = ["block", "visible tokens", "looked at by a head", "previous token, at most", "after the same, at most"]
    cells = [
        [
            layer,
            f"{block['visible']:.1f}",
            f"{min(block['looked_at']):.1f} to {max(block['looked_at']):.1f}",
            f"{max(block['previous']):.1%}",
            f"{max(block['repeat']):.1%} (chance {block['repeat_by_chance']:.1%})",
        ]
        for layer, block in report["attention"].items()
        if block is not None
    ]
    return _columns(header, cells)


def _columns(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]
    )
