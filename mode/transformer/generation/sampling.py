"""From logits to the next token: greedy, temperature, top-k, top-p and repetition penalty.

A function of its arguments alone: random numbers come from outside, one per row. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mode.ops import at_least_float32


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The restrictions apply in this order: penalty, temperature, top-k, top-p."""

    temperature: float = 0.0  # 0: the likeliest token
    top_k: int | None = None  # only the k likeliest
    top_p: float | None = None  # only the likeliest that together have this probability
    repetition_penalty: float = 1.0  # above 1: makes what the row holds already less likely

    def __post_init__(self) -> None:
        for name, value, legal, good in (
            ("temperature", self.temperature, "at least 0", 0 <= self.temperature < float("inf")),
            ("top_k", self.top_k, "at least 1, or None", self.top_k is None or self.top_k >= 1),
            ("top_p", self.top_p, "above 0 and at most 1, or None", self.top_p is None or 0 < self.top_p <= 1),
            ("repetition_penalty", self.repetition_penalty, "above 0", 0 < self.repetition_penalty < float("inf")),
        ):
            if not good:
                raise ValueError(f"{name} is {value}; it must be {legal}")


def sample(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor, seen_BV: Tensor | None = None) -> Tensor:
    """The next token of each row, [B]. `uniform_B` are float64 numbers in [0, 1), unused at temperature 0.

    `seen_BV` is True for the tokens a row holds already; only the repetition penalty reads it.
    """
    logits_BV = at_least_float32(logits_BV)
    if seen_BV is not None and sampling.repetition_penalty != 1:
        logits_BV = torch.where(seen_BV, penalised(logits_BV, sampling.repetition_penalty), logits_BV)
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    scaled_BV = logits_BV.double()
    scaled_BV = (scaled_BV - scaled_BV.amax(dim=-1, keepdim=True)) / sampling.temperature  # no overflow when tiny
    return draw(restrict(scaled_BV, sampling.top_k, sampling.top_p).softmax(dim=-1), uniform_B)


def penalised(logits_BV: Tensor, penalty: float) -> Tensor:
    """Positive logits divided and negative ones multiplied, so that either way the token loses."""
    return torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)


def restrict(logits_BV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """-inf for all but the k likeliest and, of these, the fewest that have probability `top_p`; of equals, the lower
    ids."""
    if top_k is None and top_p is None:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        sorted_BV[:, top_k:] = float("-inf")
    if top_p is not None:
        scores_BV = sorted_BV.softmax(dim=-1)
        before_BV = scores_BV.cumsum(dim=-1) - scores_BV
        before_BV[:, 0] = 0  # the likeliest always stays
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, float("-inf"))
    return torch.empty_like(sorted_BV).scatter(1, order_BV, sorted_BV)


def draw(scores_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token at which the running sum of probabilities exceeds the row's random number."""
    sums_BV = scores_BV.cumsum(dim=-1)
    total_B1 = sums_BV[:, -1:]
    level_B1 = torch.minimum(uniform_B.unsqueeze(1) * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
    return torch.searchsorted(sums_BV, level_B1, right=True).squeeze(1)
