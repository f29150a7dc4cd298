"""The language model's loss: cross-entropy, and the routing terms that the layers' records hold.

A routing term is the mean over blocks of the layers' own losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mode import ops
from mode.records import LayerRecord

NO_LABEL = -100  # a position that nothing is asked of


def compute_losses(
    logits_BLV: Tensor, labels_BL: Tensor, records: Sequence[LayerRecord]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the weighted total, each term before its weight)."""
    terms = {"cross_entropy": cross_entropy(logits_BLV, labels_BL)}
    weights = {"cross_entropy": 1.0}
    values: dict[str, list[Tensor]] = {}
    for record in records:
        for name, loss in record.losses.items():
            values.setdefault(name, []).append(loss)
            weights[name] = record.weights[name]
    terms |= {name: torch.stack(losses).mean() for name, losses in sorted(values.items(), key=_order)}
    total = sum((weights[name] * terms[name] for name in terms), start=torch.zeros((), device=logits_BLV.device))
    return total, terms


def _order(item: tuple[str, list[Tensor]]) -> int:
    """The same on every rank and for every order of layers: the terms are reduced as one tensor."""
    return ("expert_balance", "expert_z", "depth_predictor", "depth_aux", "depth_balance").index(item[0])


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean over the labelled positions; position i is scored on label i + 1."""
    num_labelled = (labels_BL[:, 1:] != NO_LABEL).sum()
    return token_losses(logits_BLV, labels_BL).sum() / num_labelled.clamp(min=1)


def token_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """[B, L - 1]: the loss of each prediction; 0 where there is no label.

    The labels are shifted, not the logits: a slice of the logits would be copied.
    """
    targets_T = F.pad(labels_BL[:, 1:], (0, 1), value=NO_LABEL).flatten()
    logits_TV = ops.at_least_float32(logits_BLV).flatten(0, 1)
    losses_T = ops.cross_entropy(logits_TV, targets_T, NO_LABEL)
    return losses_T.view_as(labels_BL)[:, :-1]
