"""The figures of a comparison, as plain JSON values: every run, every variant, matched points, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from comparing.comparable import Comparability, judge
from comparing.matching import matched, number, spread, verdict
from mode import accounting
from mode.runs import AXES, Run, Variant, differences

Figures = dict[str, Any]


def compare(variants: Sequence[Variant], baseline: Variant, axis: str, num_points: int, by: float = 0.0) -> Figures:
    runs = [run for variant in variants for run in variant.runs]
    common = judge(runs)
    return {
        "unit": common.unit,
        "axis": axis,
        "baseline": baseline.label,
        "warnings": common.warnings,
        "runs": [_run(run, variant.label, common) for variant in variants for run in variant.runs],
        "variants": [variant_figures(variant, common) for variant in variants],
        "matched": {name: matched(variants, name, num_points, common) for name in AXES},
        "verdicts": [verdict(variant, baseline, axis, common, by) for variant in variants if variant is not baseline],
        "differences": differences(variants),
    }


def _run(run: Run, label: str, common: Comparability) -> Figures:
    counted, scale = run.counted, common.scale(run)
    best = int(counted.loss.argmin()) if len(counted.loss) else None
    return {
        "directory": str(run.directory),
        "variant": label,
        "seed": run.seed,
        "state": run.state,
        "finished": run.finished,
        "planned_steps": run.planned_steps,
        **{name: number(run.last[name]) for name in ("step", "tokens", "flops")},
        "seconds": number(run.seconds[-1]),
        "loss_tag": run.loss_tag,
        "final": _final(run, run.loss_tag, scale),
        "best": None if best is None else number(counted.loss[best] * scale),
        "best_step": None if best is None else int(counted.x["steps"][best]),
        "final_top_k": _final(run, "loss/val", scale),
        "final_causal": _final(run, "loss/val_causal", scale),
        "final_train": _final(run, "loss/train", scale),
        "diverged_at": run.diverged_at(run.loss_tag),
        "bytes_per_token": run.bytes_per_token,
        "flops_per_token": number(run.last["flops"] / run.last["tokens"]),
        "tokens_per_second": number(run.last["tokens"] / run.seconds[-1]) if run.seconds[-1] else None,
        "step_seconds": _median(run, "perf/step_seconds"),
        "peak_memory_bytes": max(run.values("perf/peak_memory_bytes").values(), default=None),
        "no_op_share": _late_mean(run, "experts/no_op_share"),
        "dropped_share": _late_mean(run, "experts/dropped_share"),
        "kept_share": _late_mean(run, "depth/kept_fraction"),
        "kept_share_causal": _late_mean(run, "depth/kept_fraction_causal"),
        "notes": run.notes,
        "extensions": run.extensions,
    }


LOSSES = ("final", "best", "final_top_k", "final_causal", "final_train")
COSTS = (
    *("flops_per_token", "tokens_per_second", "step_seconds", "peak_memory_bytes"),
    *("no_op_share", "dropped_share", "kept_share", "kept_share_causal"),
)


def variant_figures(variant: Variant, common: Comparability) -> Figures:
    """Where only some seeds are finished, their last and best losses are those of the variant."""
    runs = [_run(run, variant.label, common) for run in variant.runs]
    finished = [run for run in runs if run["finished"]] or runs
    config = variant.runs[0].config
    active = accounting.active_parameters(config, accounting.expected_counts(config, rows=1))
    return {
        "label": variant.label,
        "directories": [run["directory"] for run in runs],
        "seeds": [run["seed"] for run in runs],
        "parameters": accounting.num_parameters(config),
        "active_parameters": round(sum(active.values())),
        **{name: spread([run[name] for run in finished]) for name in LOSSES},
        **{name: spread([run[name] for run in runs]) for name in COSTS},
        "left_out": [run["directory"] for run in runs if run not in finished],
    }


def _final(run: Run, tag: str, scale: float) -> float | None:
    values = list(run.values(tag).values())
    return number(values[-1] * scale) if values else None


def _median(run: Run, tag: str) -> float | None:
    values = list(run.values(tag).values())
    return number(statistics.median(values)) if values else None


def _late_mean(run: Run, tag: str) -> float | None:
    """Of the second half of the logged steps: one step alone is noisy, and the first ones are still settling."""
    values = list(run.values(tag).values())
    return number(statistics.fmean(values[len(values) // 2 :])) if values else None
