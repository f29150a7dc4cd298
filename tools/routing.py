"""What a model's routers decided on held-out text: numbers, pictures and a page with the text in colours.

    python tools/routing.py runs/mode
    python tools/routing.py runs/mode/checkpoints/step_00000200 --sequences 16
    python tools/routing.py exported/mode --causal predictor --output report

Writes routing.json (all numbers), PNG files and routing.html (one file, text coloured by compute spent) into the
folder `routing` of the run, or beside an exported folder, and adds the pictures to the run in TensorBoard.
The decisions shown are those of top-k routing, as in training, or of --causal. The leak is what top-k routing gains
from seeing the future: the loss at a position given its prefix alone, less that given the whole sequence. Attention is
that of the first batch: a model whose loss does not fall with the position has no head that looks at what followed an
earlier occurrence of its token. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mode.tooling import add_device, choose_device, print_figures

if TYPE_CHECKING:
    from mode.config.settings import ModeConfig


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="routing.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="RUN", help="a run directory, a folder named step_N or an exported folder")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step, given a run directory")
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="how many held-out sequences (default: mode.train.eval_sequences, as in training)",
    )
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    parser.add_argument(
        "--causal",
        choices=("top_k", "predictor", "router"),
        default="top_k",
        help="whose decisions are shown: top_k, as in training (default), or what a token can decide by alone",
    )
    parser.add_argument(
        "--leak",
        type=int,
        default=8,
        metavar="N",
        help="positions per sequence at which the leak of depth routing is measured (default: 8; 0: not at all)",
    )
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="sequences shown in colour (default: 4)")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="where the files go (default: RUN/routing; for an exported FOLDER, FOLDER_routing)",
    )
    parser.add_argument("--no_tensorboard", action="store_true", help="write no pictures for TensorBoard")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    return parser.parse_args(arguments)


def check(arguments: argparse.Namespace) -> None:
    import importlib.util

    from mode.config.section import ConfigError

    for name, least in (("sequences", 1), ("batch_size", 1), ("leak", 0), ("texts", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name}", f"is {value}; it must be at least {least}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib", 'is not installed; pip install "deepspeed-mode[plots]", or pip install matplotlib'
        )
    if arguments.output is not None:
        try:
            Path(arguments.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("--output", f"is {arguments.output}, no folder to write to: {error.strerror}") from None


def passes_of(config: ModeConfig, shown: str, source: Path) -> dict[str, bool | str]:
    """The ways of routing to look at, as arguments of the model's forward."""
    from mode.config.section import ConfigError

    if config.depth is None and config.experts is None:
        raise ConfigError(
            "RUN", f"{source} is a dense model: it has neither experts nor depth routing, so there is nothing to see"
        )
    passes: dict[str, bool | str] = {"top_k": False}
    if config.depth is not None:
        passes |= {method: method for method in config.depth.causal_methods}
    if shown not in passes:
        raise ConfigError("--causal", f'is "{shown}"; this model decides by {" or ".join(passes)}')
    return passes


def make_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does it, and returns the numbers to print."""
    check(arguments)  # before anything that needs matplotlib
    import torch
    from routes import figures, leak
    from routes.attention import attention_figures
    from routes.survey import survey, token_flops
    from routes.write import write_report
    from tqdm import tqdm

    from mode.data import spread_rows, validation_batches
    from mode.training.checkpoints.load import load_with_text

    chosen = choose_device(arguments.device)
    loaded, data = load_with_text(Path(arguments.model), arguments.step, device=chosen)
    config, device = loaded.model.config, torch.device(chosen)
    passes = passes_of(config, arguments.causal, loaded.source)
    rows = spread_rows(data.validation.rows, arguments.sequences or config.train.eval_sequences)
    end_of_text = data.tokenizer.end_of_text if config.data.document_masking else None
    batches = list(validation_batches(rows, batch_size=min(arguments.batch_size, len(rows)), end_of_text=end_of_text))
    positions = leak.spread_positions(arguments.leak, rows.shape[1]) if arguments.leak and config.depth else []
    total = len(batches) * (len(passes) + len(positions))
    with tqdm(total=total, desc="routing", unit="batch", leave=False, disable=None) as bar:
        found = {
            name: survey(loaded.model, batches, causal=causal, device=device, advance=bar.update)
            for name, causal in passes.items()
        }
        leaked = None
        if positions:
            prefix = leak.prefix_losses(
                loaded.model, batches, positions, causal=False, device=device, advance=bar.update
            )
            leaked = leak.leak_figures(positions, prefix, {name: each.losses_NL for name, each in found.items()})
    shown = found[arguments.causal]
    flops_NL = token_flops(config, shown)
    report = {
        "name": loaded.name,
        "model": str(loaded.source),
        "description": config.description,
        "sequences": len(rows),
        "sequence_length": config.model.sequence_length,
        "shown": arguments.causal,
        "loss": {name: float(each.losses_NL.mean()) for name, each in found.items()},
        "depth": figures.depth_figures(config, found, arguments.causal),
        "experts": figures.expert_figures(config, shown),
        "entropy": figures.entropy_figures(config, shown),
        "attention": attention_figures(loaded.model, batches[:1], causal=passes[arguments.causal], device=device),
        "flops_per_token": {name: float(getattr(flops_NL, name)()) for name in ("mean", "min", "max")},
        "leak": leaked,
    }
    return write_report(
        report,
        loaded,
        shown,
        flops_NL,
        output=None if arguments.output is None else Path(arguments.output),
        tensorboard=not arguments.no_tensorboard,
        num_texts=arguments.texts,
    )


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    from routes.table import render

    return print_figures(lambda: make_report(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
