"""Held-out loss of a trained model, with top-k routing and as in sampling.

    python tools/evaluate.py runs/mode
    python tools/evaluate.py exported/mode --sequences 256 --json
    python tools/evaluate.py exported/mode --text notes.md other_texts/

Top-k routing looks at the whole sequence, as in training, so its loss may profit from the future. Causal routing lets
each token decide for itself, by the predictor or by the router's own logit: that is what sampling does, and the loss
to compare with other models. Experts with a capacity are also evaluated as in training, where they drop what exceeds
it: that is the loss at the compute of training, and it depends on the batch. The loss by position tells what the
tokens before are worth: where it stops falling, the model makes nothing of what lies further back. The loss on as many
sequences of the training text stands beside it: the difference is what the model has by heart, and how the two texts
differ. The text is that of the model's configuration, prepared again if need be, or that of --text.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mode.tooling import add_device, choose_device, print_figures


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run directory, a folder named step_N or an exported folder")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step, given a run directory")
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="how many sequences (default: mode.train.eval_sequences, as in training)",
    )
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="sequences at a time (default: 8)")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="PATH",
        help="evaluate on this text instead: files, folders or globs, as mode.data.files.paths takes them",
    )
    parser.add_argument("--text_column", metavar="NAME", help="of the tables of --text (default: text)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does it, and returns the figures to print."""
    import torch

    from mode.config.section import ConfigError
    from mode.config.settings import FilesConfig
    from mode.data import pack_files
    from mode.training.checkpoints.load import load_model, load_with_text
    from mode.training.loop.evaluate import evaluate

    for name in ("sequences", "batch_size"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", f"is {value}; it must be at least 1")
    if arguments.text_column is not None and arguments.text is None:
        raise ConfigError("--text_column", "is for the tables of --text; name them, or leave it out")
    device = choose_device(arguments.device)
    if arguments.text is None:
        loaded, data = load_with_text(Path(arguments.model), arguments.step, device=device)
        text, training_text = data.validation, data.train
    else:
        files = FilesConfig(paths=tuple(arguments.text), text_column=arguments.text_column or "text")
        loaded, training_text = load_model(Path(arguments.model), arguments.step, device=device), None
        text = pack_files(files, loaded.tokenizer, loaded.model.config.model.sequence_length)
    config = loaded.model.config
    num_rows = min(arguments.sequences or config.train.eval_sequences, text.num_rows)
    methods = ("router",) if config.depth is None else config.depth.causal_methods
    passes: dict[str, bool | str] = {"top_k": False}
    if config.depth is not None:
        passes |= {method: method for method in methods}
    if config.experts is not None and config.experts.capacity_factor is not None:
        passes[DROPPING] = False if config.depth is None else methods[0]
    look_at = partial(
        evaluate,
        loaded.model,
        num_rows=num_rows,
        batch_size=arguments.batch_size,
        end_of_text=loaded.tokenizer.end_of_text if config.data.document_masking else None,
        device=torch.device(device),
        progress=lambda: None,
    )
    found = {name: look_at(text, causal=causal, dropping=name == DROPPING) for name, causal in passes.items()}
    counted = "top_k" if config.depth is None else methods[0]
    top_k = found["top_k"].depth
    target = None if config.depth is None else config.depth.capacity_fraction
    by_chance = config.depth is not None and config.depth.selection == "stochastic"  # whose logits are noise
    return {
        "model": str(loaded.source),
        "description": config.description,
        "text": arguments.text,
        "sequences": num_rows,
        "sequence_length": config.model.sequence_length,
        "loss": {name: result.loss for name, result in found.items()},
        "training_loss": None if training_text is None else look_at(training_text, causal=passes[counted]).loss,
        "bits_per_byte": {name: result.loss / math.log(2) / text.bytes_per_token for name, result in found.items()},
        "loss_by_position": {
            name: [
                {"first": first, "last": last, "loss": fmean(result.by_position[first - 1 : last])}
                for first, last in position_ranges(config.model.sequence_length)
            ]
            for name, result in found.items()
        },
        "top_k_sees_the_future": config.depth is not None and not by_chance,
        "sampling_by": None if config.depth is None else counted,
        "target_kept": target,
        "blocks": {
            str(layer): {
                "kept": {name: result.depth[layer].kept for name, result in found.items()},
                "predictor_accuracy": shares.predictor_accuracy,
                "router_accuracy": None if by_chance else shares.router_accuracy,
            }
            for layer, shares in top_k.items()
        },
    }


def position_ranges(length: int) -> list[tuple[int, int]]:
    """(first, last) of ranges of predicted positions, each as long as all before it. Position 0 is not predicted."""
    starts = [1, *(2**power for power in range(3, length.bit_length()) if 2**power < length)]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), length - 1], strict=True))


DROPPING = "dropping"
NAMES = {"top_k": "top-k", "predictor": "predictor", "router": "router logit", DROPPING: "dropping as in training"}


def render(figures: dict[str, Any]) -> str:
    from mode.training.logging.console import table

    losses, bits = figures["loss"], figures["bits_per_byte"]
    kind = "held-out sequences"
    if figures["text"] is not None:
        first, *more = figures["text"]
        kind = f"sequences of {first}{f' and {len(more)} more' if more else ''},"
    rows = [
        ("model", figures["model"]),
        ("text", f"{figures['sequences']} {kind} of {figures['sequence_length']} tokens"),
    ]
    places = figures["loss_by_position"][figures["sampling_by"] or "top_k"]
    by_position = ", ".join(f"{place['first']}-{place['last']} {place['loss']:.3f}" for place in places)
    alone = not figures["blocks"]  # then top-k of the depth router means nothing
    for name, loss in losses.items():
        note = ", sees the future" * (name == "top_k" and figures["top_k_sees_the_future"])
        note += ", used in sampling" * (name == figures["sampling_by"])
        title = "loss" if alone and name == "top_k" else f"loss, {NAMES[name]}"
        rows.append((title, f"{loss:.4f}  ({bits[name]:.4f} bits per byte{note})"))
    training, held_out = figures["training_loss"], losses[figures["sampling_by"] or "top_k"]
    if training is not None:
        rows.append(("loss, training text", f"{training:.4f}  (held out: {held_out - training:+.4f})"))
    if alone:
        return table([*rows, ("loss by position", by_position)])
    rows.append((f"by position, {NAMES[figures['sampling_by']]}", by_position))
    ways = [name for name in losses if name != DROPPING]
    header = ["block", "target", *(f"kept, {NAMES[name]}" for name in ways), "predictor right", "router right"]
    lines = ["  ".join(header)]
    for layer, block in figures["blocks"].items():
        accuracies = [block["predictor_accuracy"], block["router_accuracy"]]
        cells = [
            layer,
            f"{figures['target_kept']:.1%}",
            *(f"{block['kept'][name]:.1%}" for name in ways),
            *("-" if accuracy is None else f"{accuracy:.1%}" for accuracy in accuracies),
        ]
        lines.append("  ".join(f"{cell:>{len(title)}}" for cell, title in zip(cells, header, strict=True)))
    share = f"{1 - figures['target_kept']:.1%}"
    about = f"right: agrees with top-k about a token; who always skips is right for {share}"
    return table(rows) + "\n\n" + "\n".join(f"  {line}" for line in [*lines, about])


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    return print_figures(lambda: measure(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
