"""Turns a checkpoint into a folder that loads without DeepSpeed.

    python tools/export.py runs/mode exported/mode
    python tools/export.py runs/mode/checkpoints/step_00000400 exported/mode_400 --dtype bf16

The folder holds model.safetensors, config.json and the tokenizer. ModeTransformer.from_pretrained loads it and
unpickles nothing; a run starts from it with --set mode.train.init_from=FOLDER. Checkpoints of every ZeRO stage,
number of ranks and expert-parallel size are read, by one process. The checkpoint itself is a pickle: it is read so
that no code in it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a run directory (its newest whole checkpoint) or a folder named step_N")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step, given a run directory")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the weights; the selection bias stays fp32 (default: fp32, the optimizer's own copy)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an export that is there already")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(arguments)


def export(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does it, and returns the figures to print."""
    import torch

    from mode.config.section import ConfigError
    from mode.host import num_cores
    from mode.training.checkpoints.checkpoint import step_of
    from mode.training.checkpoints.consolidate import config_of, full_weights
    from mode.training.checkpoints.load import choose_checkpoint
    from mode.transformer.model import ModeTransformer
    from mode.transformer.pretrained import DTYPES, TOKENIZER_FILES, WEIGHTS, check_output, save_pretrained

    output = Path(os.path.abspath(arguments.output))
    check_output(output, arguments.overwrite)
    checkpoint = choose_checkpoint(Path(os.path.abspath(arguments.checkpoint)), arguments.step)
    run_dir = checkpoint.parent.parent
    for name in TOKENIZER_FILES:
        if not (run_dir / "tokenizer" / name).is_file():
            missing = run_dir / "tokenizer" / name
            raise ConfigError("checkpoint", f"{missing} is missing; name a checkpoint inside its run directory")
    config = config_of(checkpoint)
    output.parent.mkdir(parents=True, exist_ok=True)
    workers = min(4, num_cores())
    weights = full_weights(checkpoint, scratch=output.parent, workers=workers)
    with torch.device("meta"):
        model = ModeTransformer(config).to(DTYPES[arguments.dtype])  # knows what stays float32
    weights = {name: weights[name].to(tensor.dtype) for name, tensor in model.weights().items()}
    save_pretrained(output, config, weights, run_dir / "tokenizer", overwrite=arguments.overwrite)
    step = step_of(checkpoint)
    evaluated, loss = validation_loss(run_dir, step)
    return {
        "output": arguments.output,
        "model": run_dir.name,
        "description": config.description,
        "checkpoint": str(checkpoint),
        "step": step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": arguments.dtype,
        "bytes": (output / WEIGHTS).stat().st_size,
        "validation_loss": loss,
        "validation_step": evaluated,
    }


def validation_loss(run_dir: Path, step: int) -> tuple[int | None, float | None]:
    """(step, loss) of the last evaluation up to `step`; (None, None) where the metrics cannot be read."""
    from mode.training.logging.run_files import METRICS, RunError, read_metrics

    try:
        rows = read_metrics(run_dir)[0] if (run_dir / METRICS).is_file() else []
    except RunError:
        rows = []
    for row in reversed(rows):
        if row["step"] <= step and "loss/val" in row:
            return int(row["step"]), row["loss/val"]
    return None, None


def render(figures: dict[str, Any]) -> str:
    from mode.training.logging.console import table

    loss, evaluated = figures["validation_loss"], figures["validation_step"]
    when = "" if evaluated == figures["step"] else f"  (at step {evaluated})"
    return table(
        [
            ("model", figures["model"]),
            ("checkpoint", figures["checkpoint"]),
            ("step", f"{figures['step']:,}"),
            ("parameters", f"{figures['parameters']:,}"),
            ("weights", f"{figures['bytes']:,} bytes, {figures['dtype']}"),
            ("validation loss", "not evaluated" if loss is None else f"{loss:.4f}{when}"),
            ("use", f'ModeTransformer.from_pretrained("{figures["output"]}")'),
            ("train on", f"deepspeed train.py ... --set mode.train.init_from={figures['output']}"),
        ]
    )


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    from mode.tooling import print_figures

    return print_figures(lambda: export(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
