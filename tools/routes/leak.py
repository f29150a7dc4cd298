"""Does top-k routing profit from the future? The loss at a position, given the whole sequence or only its prefix.

Top-k over a sequence lets later tokens decide whether an earlier one is kept. Given the prefix alone, top-k chooses
among its tokens, with the capacity of its length, as no later token is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from mode.data import Batch
from mode.ops import at_least_float32
from mode.training.loop.inputs import model_inputs
from mode.transformer.model import ModeTransformer


def spread_positions(number: int, length: int) -> list[int]:
    """At most `number` positions, evenly over those of a sequence that have a next token."""
    places = (np.arange(number) + 0.5) * (length - 1) / number
    return sorted({int(place) for place in places})


@torch.no_grad()
def prefix_losses(
    model: ModeTransformer,
    batches: Iterable[Batch],
    positions: list[int],
    *,
    causal: bool | str,
    device: torch.device,
    advance: Callable[[], None],
) -> NDArray[np.float64]:
    """[N, positions]: the loss at each position when the model is given the tokens up to it and no others."""
    rows = []
    for batch in batches:
        inputs, num_rows = model_inputs(batch, device), int(batch.weights.sum())
        ids_BL, documents_BL = inputs["input_ids"], inputs["documents"]
        assert ids_BL is not None
        losses = []
        for position in positions:
            documents = None if documents_BL is None else documents_BL[:, : position + 1]
            given = inputs | {"input_ids": ids_BL[:, : position + 1], "documents": documents}
            logits_BV = at_least_float32(model(**given, causal=causal).logits[:, -1])
            losses.append(F.cross_entropy(logits_BV, ids_BL[:, position + 1], reduction="none")[:num_rows])
            advance()
        rows.append(torch.stack(losses, dim=1).double().cpu().numpy())
    return np.concatenate(rows)


def leak_figures(
    positions: list[int],
    prefix_NP: NDArray[np.float64],
    full: Mapping[str, NDArray[np.float64]],
) -> dict[str, Any]:
    """`full` holds the losses [N, L - 1] of passes over whole sequences: "top_k" and causal ones."""
    at = {name: losses_NL[:, positions] for name, losses_NL in full.items()}
    gain_NP = prefix_NP - at["top_k"]
    rows_N = gain_NP.mean(axis=1)  # the positions of one sequence are not independent, sequences are
    return {
        "positions": positions,
        "sequences": len(gain_NP),
        "top_k_full": float(at["top_k"].mean()),
        "top_k_prefix": float(prefix_NP.mean()),
        "leak": float(gain_NP.mean()),
        "standard_error": float(rows_N.std(ddof=1) / len(rows_N) ** 0.5) if len(rows_N) > 1 else None,
        "leak_by_position": gain_NP.mean(axis=0).tolist(),
        "causal_full": {name: float(losses.mean()) for name, losses in at.items() if name != "top_k"},
    }
