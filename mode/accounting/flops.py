"""FLOPs of matrix products, 2 per multiply-add, and how many steps a budget of them makes.

Norms, softmax, rotary positions, activation functions and the embedding lookup are left out, as torch's
FlopCounterMode leaves them out.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mode.accounting.counts import (
    BlockCounts,
    check_blocks,
    check_conserved,
    expected_block_counts,
    expected_counts,
    steps_by_capacity,
)
from mode.accounting.parameters import block_parameters, one_expert_parameters
from mode.config.file import RunConfig
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig

MAX_STEPS = 10**15  # beyond any run


@dataclass(frozen=True)
class Flops:
    """FLOPs of a part of the model on one batch."""

    forward: int = 0
    backward: int = 0

    @property
    def training(self) -> int:
        """Forward and backward; what activation checkpointing computes twice is not counted twice."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.backward + other.backward)


def product(forward: int) -> Flops:
    """A matrix product: backward is one more for the input and one for the weight."""
    return Flops(forward, 2 * forward)


def predictor_flops(tokens: int, width: int, predictor_width: int) -> Flops:
    """The predictor stands behind a stop-gradient, so its first layer has no gradient to its input."""
    first = 2 * tokens * width * predictor_width
    return Flops(first, first) + product(2 * tokens * predictor_width)


def block_flops_by_part(config: ModeConfig, layer: int, counts: BlockCounts) -> dict[str, Flops]:
    """FLOPs of block `layer`.

    Attention scores are counted as the full S x S square, as FlopCounterMode counts them; a causal
    kernel may do half. Their backward is 2.5 times forward: flash-style kernels compute the scores again.
    With expert parallelism `experts` is the work this batch causes, on whichever rank it is done.
    """
    check_conserved(config, layer, counts)
    model, depth, experts = config.model, config.depth, config.experts
    batch, slots, tokens = counts.rows * counts.length, counts.rows * counts.slots, counts.tokens
    parameters = block_parameters(config, layer)
    parts: dict[str, Flops] = {}
    if "depth_router" in parameters:
        parts["depth_router"] = product(2 * batch * model.width)
    if depth is not None and "predictor" in parameters:
        assert depth.predictor is not None
        parts["predictor"] = predictor_flops(batch, model.width, depth.predictor.width)
    parts["attention_projections"] = product(2 * slots * parameters["attention"])
    square = 2 * slots * counts.slots * model.num_heads * model.head_width
    parts["attention_scores"] = Flops(2 * square, 5 * square)
    if experts is None:
        parts["feed_forward"] = product(2 * tokens * parameters["feed_forward"])
        return parts
    parts["expert_router"] = product(2 * tokens * parameters["expert_router"])
    parts["experts"] = product(2 * counts.processed * one_expert_parameters(config))
    if experts.num_shared:
        parts["shared_experts"] = product(2 * tokens * parameters["shared_experts"])
    return parts


def block_flops(config: ModeConfig, layer: int, counts: BlockCounts) -> Flops:
    return sum(block_flops_by_part(config, layer, counts).values(), Flops())


def head_flops(config: ModeConfig, rows: int, length: int) -> Flops:
    return product(2 * rows * length * config.model.width * config.model.vocab_size)


def model_flops_by_part(config: ModeConfig, counts: Sequence[BlockCounts]) -> dict[str, Flops]:
    """FLOPs of the model on one batch, the blocks' parts summed over blocks, and the head."""
    check_blocks(config, counts)
    parts: dict[str, Flops] = {}
    for layer, block in enumerate(counts):
        for part, flops in block_flops_by_part(config, layer, block).items():
            parts[part] = parts.get(part, Flops()) + flops
    parts["head"] = head_flops(config, counts[0].rows, counts[0].length)
    return parts


def model_flops(config: ModeConfig, counts: Sequence[BlockCounts]) -> Flops:
    return sum(model_flops_by_part(config, counts).values(), Flops())


def per_token(flops: int, counts: Sequence[BlockCounts]) -> Fraction:
    """FLOPs of a batch, per token of the batch: kept and skipped tokens alike."""
    return Fraction(flops, counts[0].rows * counts[0].length)


def recompute_flops(config: ModeConfig, counts: Sequence[BlockCounts]) -> int:
    """What activation checkpointing computes again in backward: every block's forward, at most.

    torch stops a recomputation once nothing more is needed, which may spare a block's last product.
    """
    check_blocks(config, counts)
    if not config.model.activation_checkpointing:
        return 0
    return sum(block_flops(config, layer, block).forward for layer, block in enumerate(counts))


def step_flops(run: RunConfig, world_size: int, capacity_fraction: Fraction | None = None) -> int:
    """The training FLOPs an optimizer step is expected to take, over all ranks.

    `capacity_fraction` is the share of a sequence that routed blocks keep, by default the configuration's.
    """
    micro, accumulation = run.engine.batch_layout(world_size)
    return (
        model_flops(run.mode, expected_counts(run.mode, micro, capacity_fraction=capacity_fraction)).training
        * accumulation
        * world_size
    )


def run_flops(run: RunConfig, world_size: int, steps: int) -> int:
    """The training FLOPs that a run of `steps` optimizer steps is expected to take, the depth warm-up included."""
    return _flops_of_steps(run, world_size)(steps)


def _flops_of_steps(run: RunConfig, world_size: int) -> Callable[[int], int]:
    depth, length = run.mode.depth, run.mode.model.sequence_length
    each = step_flops(run, world_size)
    if depth is None or not depth.warmup_fraction:
        return lambda steps: steps * each

    config, (micro, accumulation) = run.mode, run.engine.batch_layout(world_size)
    routed = [layer for layer in range(config.model.num_layers) if config.is_routed(layer)]

    @functools.cache
    def of_a_routed_block(share: Fraction | None) -> int:  # all of them are alike
        return block_flops(
            config, routed[0], expected_block_counts(config, routed[0], micro, capacity_fraction=share)
        ).training

    def total(steps: int) -> int:
        more = sum(
            times * (of_a_routed_block(Fraction(kept, length)) - of_a_routed_block(None))
            for kept, times in steps_by_capacity(depth, steps, length).items()
        )
        return steps * each + more * len(routed) * accumulation * world_size

    return total


def num_steps(run: RunConfig, world_size: int) -> int:
    """Optimizer steps, from whichever of steps, tokens and flops is set: the nearest whole number, at least 1."""
    train, (micro, accumulation) = run.mode.train, run.engine.batch_layout(world_size)
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, round(train.tokens / (micro * accumulation * world_size * run.mode.model.sequence_length)))
    assert train.flops is not None
    most = max(1, round(train.flops / step_flops(run, world_size)))  # as many as without a warm-up, which only adds
    if most > MAX_STEPS:
        raise ConfigError(
            "mode.train.flops", f"is {train.flops:g}, which makes {most:.3g} steps; it must make at most {MAX_STEPS:g}"
        )
    if run.mode.depth is None or not run.mode.depth.warmup_fraction:
        return most
    budget, total = train.flops, _flops_of_steps(run, world_size)
    enough = bisect_left(range(most), budget, key=total)
    return max(1, min(enough - 1, enough, key=lambda steps: abs(total(steps) - budget)))
