"""Bytes that expert parallelism sends."""

from __future__ import annotations

from fractions import Fraction

from mode.accounting.counts import BlockCounts
from mode.config.settings import ModeConfig


def all_to_all_bytes(config: ModeConfig, counts: BlockCounts, element_size: int) -> int:
    """What a rank hands to one all-to-all: its processed assignments, and nothing padded.

    The table of counts that precedes it, a few integers per rank, is left out.
    """
    return counts.processed * config.model.width * element_size


def leaving_bytes(sent: int, ep_size: int) -> int:
    """The share of `sent` that leaves the rank when routing is uniform: (W - 1) / W of it, rounded."""
    return round(Fraction(sent * (ep_size - 1), ep_size))


def all_to_alls_per_block(config: ModeConfig) -> int:
    """Per micro-batch: dispatch and combine, the gradient of each, and both again when recomputing."""
    if config.experts is None or config.experts.ep_size == 1:
        return 0
    return 6 if config.model.activation_checkpointing else 4
