"""A batch as the model's arguments. Knows neither engine nor optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from mode.data import Batch

Inputs = dict[str, Tensor | None]


def model_inputs(batch: Batch, device: torch.device) -> Inputs:
    """Without labels."""
    return {
        "input_ids": batch.input_ids.to(device),
        "documents": None if batch.documents is None else batch.documents.to(device),
        "sample_keys": batch.sample_ids.to(device),
    }
