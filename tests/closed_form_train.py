"""Stands in for `train.py`: writes a run whose loss is a parabola in the logarithm of its parameters.

    python closed_form_train.py CONFIG OUTPUT_DIR

`mode.train.eval_sequences` of 13 makes it fail halfway, 14 before it has written anything.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from mode import accounting
from mode.config.file import RunConfig, load_run_config
from mode.config.settings import ModeConfig

FLOOR, CURVATURE, PER_SEED = 3.0, 0.05, 0.01
OPTIMUM = {False: 40_000.0, True: 50_000.0}  # parameters, without and with depth routing
GAIN = 0.1  # of depth routing
TOP_K_GAIN = 0.5  # what top-k gains by seeing the future


def loss_of(config: ModeConfig) -> float:
    routed = config.depth is not None
    away = math.log(accounting.num_parameters(config) / OPTIMUM[routed])
    return FLOOR - GAIN * routed + CURVATURE * away**2 + PER_SEED * config.seed


def flops_until(step: int, steps: int, run: RunConfig) -> int:
    depth = run.mode.depth
    if depth is None:
        return step * accounting.step_flops(run, 1)
    return sum(
        accounting.step_flops(run, 1, accounting.capacity_fraction_at(depth, past, steps)) for past in range(step)
    )


def main(config_file: str, output_dir: str) -> int:
    run = load_run_config(config_file)
    if run.mode.train.eval_sequences == 14:
        print("error: mode.train.eval_sequences: is 14, at which this stand-in fails", file=sys.stderr)
        return 2
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**run.deepspeed, "mode": run.mode.to_dict()}))
    steps, loss, routed = accounting.num_steps(run, 1), loss_of(run.mode), run.mode.depth is not None
    tokens = 4 * run.mode.model.sequence_length
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in (max(1, steps // 2), steps):
            ahead = 1.0 if step < steps else 0.0
            row = {
                "step": step,
                "tokens": step * tokens,
                "flops": flops_until(step, steps, run),
                "perf/step_seconds": 0.5,
            }
            row["loss/val"] = loss + ahead - TOP_K_GAIN * routed
            if routed:
                row["loss/val_causal"] = loss + ahead
            metrics.write(json.dumps(row) + "\n")
            if run.mode.train.eval_sequences == 13:
                raise RuntimeError("this stand-in fails\nwith two lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
