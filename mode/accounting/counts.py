"""Capacities, and what a block did or is expected to do with one batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mode.config.settings import DepthConfig, ModeConfig, exact


def depth_capacity(fraction: float | Fraction, length: int) -> int:
    """C, how many of `length` tokens a routed block keeps: ceil(fraction x length), in exact decimals."""
    return math.ceil(exact(fraction) * length)


def capacity_fraction_at(depth: DepthConfig, step: int, num_steps: int) -> Fraction:
    """The share of a sequence that routed blocks keep in step `step`, from 0 on, of a run.

    During the warm-up it falls evenly: before the first step it would be 1, and in its last one it is the capacity.
    """
    capacity, warmup = exact(depth.capacity_fraction), exact(depth.warmup_fraction) * num_steps
    return capacity if step + 1 >= warmup else 1 - (1 - capacity) * (step + 1) / warmup


def steps_by_capacity(depth: DepthConfig, num_steps: int, length: int) -> dict[int, int]:
    """How many of a run's steps keep how many of `length` tokens."""
    capacity, warmup = exact(depth.capacity_fraction), exact(depth.warmup_fraction) * num_steps
    least = depth_capacity(capacity, length)
    begins = {length: 0}  # the first step that keeps no more
    for kept in range(length - 1, least - 1, -1):
        begins[kept] = max(0, math.ceil(warmup * (1 - Fraction(kept, length)) / (1 - capacity)) - 1)
    begins[least - 1] = num_steps
    return {
        kept: begins[kept - 1] - begin for kept, begin in begins.items() if kept >= least and begins[kept - 1] > begin
    }


def expert_capacity(capacity_factor: float, top_k: int, tokens: int, no_op_fraction: float, num_experts: int) -> int:
    """How many assignments of `tokens` tokens on a rank one real expert takes, in exact decimals."""
    return math.ceil(exact(capacity_factor) * top_k * tokens * (1 - exact(no_op_fraction)) / num_experts)


@dataclass(frozen=True)
class BlockCounts:
    """The work of one block on one batch. Without experts the last three are 0."""

    rows: int  # B
    length: int  # L, tokens per row
    slots: int  # S, the length of a row inside attention: L in a plain block
    tokens: int  # T, tokens that enter the feed-forward: the kept ones; B*S unless slots stay empty
    processed: int = 0  # R, assignments an expert works on
    no_op: int = 0  # assignments to a no-op column
    dropped: int = 0  # assignments beyond an expert's capacity

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a count cannot be negative")
        if self.slots > self.length:
            raise ValueError(f"{self.slots} slots per row, more than the {self.length} tokens of a row")
        if self.tokens > self.rows * self.slots:
            raise ValueError(f"{self.tokens} tokens, more than {self.rows} rows x {self.slots} slots")

    @property
    def kept(self) -> int:
        return self.tokens

    @property
    def skipped(self) -> int:
        return self.rows * self.length - self.tokens

    @property
    def assignments(self) -> int:
        return self.processed + self.no_op + self.dropped


def expected_block_counts(
    config: ModeConfig,
    layer: int,
    rows: int,
    length: int | None = None,
    training: bool = True,
    capacity_fraction: Fraction | None = None,
) -> BlockCounts:
    """What block `layer` does with `rows` sequences when every column gets exactly its target share.

    Evaluation (`training=False`) is dropless. `capacity_fraction` is the share that a routed block keeps, by default
    the configuration's; under token_choice, too.
    """
    length = config.model.sequence_length if length is None else length
    slots = length
    if config.depth is not None and config.is_routed(layer):
        slots = depth_capacity(capacity_fraction or config.depth.capacity_fraction, length)
    tokens = rows * slots
    experts = config.experts
    if experts is None:
        return BlockCounts(rows, length, slots, tokens)
    no_op = round(exact(experts.no_op_fraction) * tokens * experts.top_k)
    chosen = processed = tokens * experts.top_k - no_op
    if training and experts.capacity_factor is not None:
        capacity = expert_capacity(
            experts.capacity_factor, experts.top_k, tokens, experts.no_op_fraction, experts.num_experts
        )
        processed = min(chosen, experts.num_experts * capacity)
    return BlockCounts(rows, length, slots, tokens, processed, no_op, chosen - processed)


def expected_counts(
    config: ModeConfig,
    rows: int,
    length: int | None = None,
    training: bool = True,
    capacity_fraction: Fraction | None = None,
) -> list[BlockCounts]:
    """`expected_block_counts` of every block."""
    layers = range(config.model.num_layers)
    return [expected_block_counts(config, layer, rows, length, training, capacity_fraction) for layer in layers]


def check_conserved(config: ModeConfig, layer: int, counts: BlockCounts) -> None:
    """Refuses counts that lost or invented an assignment: FLOPs derived from them would be wrong."""
    choices = 0 if config.experts is None else counts.tokens * config.experts.top_k
    if counts.assignments != choices:
        raise ValueError(
            f"block {layer}: {counts.processed} processed + {counts.no_op} no-op + {counts.dropped} dropped "
            f"assignments; {counts.tokens} tokens make {choices}"
        )


def check_blocks(config: ModeConfig, counts: Sequence[BlockCounts]) -> None:
    if len(counts) != config.model.num_layers:
        raise ValueError(f"counts of {len(counts)} blocks for a model of {config.model.num_layers}")
    if len({(block.rows, block.length) for block in counts}) > 1:
        raise ValueError("the blocks' counts come from batches of different shapes")
