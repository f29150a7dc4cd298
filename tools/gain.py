"""Where a larger model's gain over a smaller one lies: on few tokens or on all. Can depth routing pay here?

    python tools/gain.py runs/moe_2_layers runs/moe_4_layers

Depth routing gives a block to a share of the tokens, so at best it keeps that part of the block's gain that lies on
them. Train the model without and with the blocks in question, for as many tokens, and see which part that is: both
predict the same held-out text, and tokens are ranked by the mean gain of their kind, in one half of the sequences for
the other. A kind is a token of the vocabulary, which a router sees at least, or the entropy of the smaller model's
prediction. Where the gain is spread evenly over both, depth routing has little to choose by: a router sees more than
these kinds, the context, and may choose better, but kept tokens attend to each other only, which costs a part again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from mode.data import PackedData
    from mode.transformer.model import ModeTransformer

SIGHTINGS = 16  # a kind seen less often than this is ranked near the mean of all
ENTROPIES = 64  # kinds of entropy, equally many tokens in each
CLEAR = 2.0  # standard errors of the gain above 0: less of it cannot be divided
KINDS = {"token": "the token", "entropy": "the entropy of the smaller one's prediction"}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    from mode.tooling import add_device, positive_integer, positive_number

    parser = argparse.ArgumentParser(
        prog="gain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("smaller", help="a run directory, a folder named step_N or an exported folder")
    parser.add_argument("larger", help="the same, of the model that has more blocks")
    parser.add_argument(
        "--capacities",
        type=positive_number,
        nargs="+",
        default=[0.125, 0.25, 0.5],
        metavar="SHARE",
        help="shares of the tokens to choose (default: 0.125 0.25 0.5)",
    )
    parser.add_argument("--sequences", type=positive_integer, default=256, metavar="N", help="held out (default: 256)")
    parser.add_argument("--batch_size", type=positive_integer, default=8, metavar="N", help="at a time (default: 8)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does it, and returns the figures to print."""
    import torch

    from mode.config.section import ConfigError
    from mode.tooling import choose_device
    from mode.training.checkpoints.load import load_with_text

    if max(arguments.capacities) > 1:
        raise ConfigError("--capacities", f"has {max(arguments.capacities):g}; a share is at most 1")
    paths = {"smaller": arguments.smaller, "larger": arguments.larger}
    device = choose_device(arguments.device)
    found = {name: load_with_text(Path(path), None, device=device) for name, path in paths.items()}
    _check_same_text(*(data for _, data in found.values()))
    passes = {
        name: predict(loaded.model, data, arguments.sequences, arguments.batch_size, device)
        for name, (loaded, data) in found.items()
    }
    ids_BL, smaller_BL, entropy_BL = passes["smaller"]
    gain_BL = smaller_BL - passes["larger"][1]
    if len(gain_BL) < 2:
        raise ConfigError("--sequences", f"leaves {len(gain_BL)} held-out sequence; two halves need at least 2")
    edges = entropy_BL.flatten().quantile(torch.linspace(0, 1, ENTROPIES + 1, dtype=torch.float64)[1:-1])
    kinds = {"token": ids_BL, "entropy": torch.bucketize(entropy_BL, edges)}
    by_sequence_B = gain_BL.mean(dim=1)
    error = (by_sequence_B.std() / len(by_sequence_B) ** 0.5).item()
    clear = gain_BL.mean().item() > CLEAR * error
    return {
        **{name: str(loaded.source) for name, (loaded, _) in found.items()},
        "sequences": len(gain_BL),
        "loss": {name: losses_BL.mean().item() for name, (_, losses_BL, _) in passes.items()},
        "gain": gain_BL.mean().item(),
        "gain_error": error,
        "better_share": (gain_BL > 0).double().mean().item(),
        "capacities": arguments.capacities,
        "shares_of_the_gain": (
            {name: held(gain_BL, kind_BL, arguments.capacities) for name, kind_BL in kinds.items()} if clear else None
        ),
    }


def _check_same_text(smaller: PackedData, larger: PackedData) -> None:
    import numpy as np

    from mode.config.section import ConfigError

    if not smaller.tokenizer.same_as(larger.tokenizer) or not np.array_equal(
        smaller.validation.rows[:], larger.validation.rows[:]
    ):
        raise ConfigError(
            "mode.data",
            "of the two models gives other held-out tokens or sequences; "
            "train both with the same data, vocab_size and sequence_length",
        )


def predict(
    model: ModeTransformer, data: PackedData, num_rows: int, batch_size: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every prediction: the token it is made from, its loss and its entropy, [B, L - 1]. Routed as in sampling."""
    import torch
    from tqdm import tqdm

    from mode.data import spread_rows, validation_batches
    from mode.training.loop.inputs import model_inputs
    from mode.transformer.losses import token_losses

    rows = spread_rows(data.validation.rows, num_rows)
    end_of_text = data.tokenizer.end_of_text if model.config.data.document_masking else None
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.inference_mode(), tqdm(total=len(rows), desc="sequences", leave=False, disable=None) as bar:
        for batch in validation_batches(rows, batch_size=batch_size, end_of_text=end_of_text):
            inputs = model_inputs(batch, torch.device(device))
            logits_BLV = model(**inputs, causal=True).logits
            losses_BL = token_losses(logits_BLV, batch.input_ids.to(device))
            log_scores_BLV = logits_BLV[:, :-1].double().log_softmax(dim=-1)
            entropy_BL = -(log_scores_BLV.exp() * log_scores_BLV).sum(dim=-1)
            real = int(batch.weights.sum())  # rows that fill up the last batch weigh nothing
            found.append((batch.input_ids[:real, :-1], losses_BL[:real].double().cpu(), entropy_BL[:real].cpu()))
            bar.update(real)
    ids_BL, losses_BL, entropy_BL = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ids_BL, losses_BL, entropy_BL


def held(gain_BL: Tensor, kind_BL: Tensor, capacities: list[float]) -> list[float]:
    """Which share of the whole gain lies on the tokens of the best kinds, by share of the tokens.

    Kinds are ranked in one half of the sequences and the gain is summed in the other, both ways: ranked and summed in
    the same half, chance alone would look like a choice.
    """
    import torch

    num_kinds = int(kind_BL.max()) + 1
    found = torch.zeros(len(capacities), dtype=torch.float64)
    for ranking, measuring in ((0, 1), (1, 0)):
        sums, counts = _by_kind(gain_BL[ranking::2], kind_BL[ranking::2], num_kinds)
        mean = sums.sum() / counts.sum()
        order = ((sums + SIGHTINGS * mean) / (counts + SIGHTINGS)).argsort(descending=True, stable=True)
        sums, counts = (values[order] for values in _by_kind(gain_BL[measuring::2], kind_BL[measuring::2], num_kinds))
        tokens, gains = (torch.cat([values.new_zeros(1), values.cumsum(0)]) for values in (counts, sums))
        found += torch.stack([_at(capacity * tokens[-1], tokens, gains) for capacity in capacities])
    return (found / gain_BL.sum(dtype=torch.float64)).tolist()


def _by_kind(gain_BL: Tensor, kind_BL: Tensor, num_kinds: int) -> tuple[Tensor, Tensor]:
    """(summed gains, how many tokens) of every kind, float64."""
    gains, kinds = gain_BL.flatten().double(), kind_BL.flatten()
    sums = gains.new_zeros(num_kinds).index_add(0, kinds, gains)
    return sums, kinds.bincount(minlength=num_kinds).double()


def _at(wanted: Tensor, tokens: Tensor, gains: Tensor) -> Tensor:
    """The gain of the first `wanted` tokens; of a kind that is taken in part, that part."""
    after = int((tokens < wanted).sum().clamp(min=1))
    part = (wanted - tokens[after - 1]) / (tokens[after] - tokens[after - 1])
    return gains[after - 1] + part * (gains[after] - gains[after - 1])


def render(figures: dict[str, Any]) -> str:
    from mode.training.logging.console import table

    better = f"the larger one predicts {figures['better_share']:.1%} of the tokens better"
    rows = [(f"{name} model", f"{figures[name]}, loss {figures['loss'][name]:.4f}") for name in ("smaller", "larger")]
    rows.append(("gain", f"{figures['gain']:.4f} +- {figures['gain_error']:.4f} nats per token; {better}"))
    rows.append(("text", f"{figures['sequences']} held-out sequences"))
    if figures["shares_of_the_gain"] is None:
        return table(rows) + f"\n\n  no gain to divide: less than {CLEAR:g} standard errors above 0"
    header = ["the best by", *(f"{capacity:.1%}" for capacity in figures["capacities"])]
    width = max(len(header[0]), *(len(words) for words in KINDS.values()))
    lines = ["share of the gain that lies on so many of the tokens", _line(header, width)]
    for kind, words in KINDS.items():
        lines.append(_line([words, *(f"{share:.1%}" for share in figures["shares_of_the_gain"][kind])], width))
    return table(rows) + "\n\n" + "\n".join(f"  {line}" for line in lines)


def _line(cells: list[str], width: int) -> str:
    return f"{cells[0]:<{width}}" + "".join(f"  {cell:>6}" for cell in cells[1:])


def main(command_line: list[str] | None = None) -> int:
    arguments = parse_arguments(command_line)
    from mode.tooling import print_figures

    return print_figures(lambda: measure(arguments), render, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
