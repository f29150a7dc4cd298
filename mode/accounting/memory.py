"""Bytes one rank holds in training, and the bytes of the key/value cache in sampling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from mode.accounting.counts import BlockCounts, check_blocks, expected_counts
from mode.accounting.parameters import num_expert_parameters, num_parameters
from mode.accounting.states import ELEMENT_SIZE, FP32, RankMemory, ZeroSettings, state_memory
from mode.config.file import RunConfig
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig

CACHE_CHUNK = 64  # slots a cache grows by: copying 1/128 of a cache per token, on the mean, is little beside reading it


def block_activation_bytes(config: ModeConfig, layer: int, counts: BlockCounts, element_size: int) -> int:
    """An estimate of what one block saves for backward, without activation checkpointing.

    It follows what autograd saves of torch's own operators on a CPU; a fused norm on a GPU saves less, and so do the
    compiled kernels of a CPU.
    """
    model, depth, experts = config.model, config.depth, config.experts
    batch, slots, tokens = counts.rows * counts.length, counts.rows * counts.slots, counts.tokens
    heads = 3 * model.head_width * (model.num_heads + model.num_kv_heads)  # qkv, rotated q and k, attended
    elements = slots * (model.width + heads) + tokens * model.width  # with the inputs of both halves
    fp32_elements = slots * (4 * model.width + model.num_heads)  # inside both norms; log-sum-exp
    if config.data.document_masking:
        elements += slots * counts.slots  # which slots see each other, as attention's kernels want it
    if depth is not None and config.is_routed(layer):
        elements += 2 * slots * model.width  # the update, before and after the gate
        elements += 2 * batch * depth.predictor.width if depth.predictor is not None else 0
        elements += batch * model.width  # the router's input
    if experts is None:
        elements += 4 * tokens * model.ffn_width  # gate, up, silu(gate) and their product
    else:
        elements += counts.processed * (2 * model.width + 2 * experts.width)  # input, output, gate, up: of grouped_mm
        elements += 4 * tokens * experts.num_shared * experts.width
        fp32_elements += 2 * tokens * experts.num_columns  # logits and scores
        fp32_elements += tokens * model.width if element_size < FP32 else 0  # the router's input
    return elements * element_size + fp32_elements * FP32


def activation_bytes(config: ModeConfig, counts: Sequence[BlockCounts], element_size: int) -> int:
    """An estimate of what the blocks save for backward. With activation checkpointing: every block's
    input, and everything of the one block being recomputed."""
    check_blocks(config, counts)
    blocks = [block_activation_bytes(config, layer, block, element_size) for layer, block in enumerate(counts)]
    if not config.model.activation_checkpointing:
        return sum(blocks)
    return sum(block.rows * block.length * config.model.width * element_size for block in counts) + max(blocks)


def logits_bytes(config: ModeConfig, rows: int, length: int, element_size: int) -> int:
    """An estimate: the logits, their fp32 log-softmax, and the fp32 gradients of both at once.

    As of torch's operators; the compiled kernel of a CPU has no log-softmax and takes half.
    """
    return rows * length * config.model.vocab_size * (element_size + 3 * FP32)


def cache_slots(longest: int) -> int:
    """How many slots per row a block's key/value cache has when its fullest row holds `longest` tokens."""
    return math.ceil(longest / CACHE_CHUNK) * CACHE_CHUNK


def block_cache_bytes(config: ModeConfig, rows: int, longest: int, element_size: int) -> int:
    """Keys and values that sampling keeps for one block: of the tokens the block kept, sized by the fullest row."""
    model = config.model
    return 2 * rows * cache_slots(longest) * model.num_kv_heads * model.head_width * element_size


def cache_bytes(config: ModeConfig, counts: Sequence[BlockCounts], element_size: int) -> int:
    """The key/value cache of the model after a batch; `expected_counts` gives the one to expect."""
    check_blocks(config, counts)
    return sum(block_cache_bytes(config, block.rows, block.slots, element_size) for block in counts)


def cache_bytes_saved(config: ModeConfig, counts: Sequence[BlockCounts], element_size: int) -> int:
    """How much larger the cache were if every block kept every token."""
    check_blocks(config, counts)
    full = sum(block_cache_bytes(config, block.rows, block.length, element_size) for block in counts)
    return full - cache_bytes(config, counts, element_size)


def largest_capacity_fraction(config: ModeConfig) -> Fraction | None:
    """The largest share of a sequence that routed blocks keep in a run: a warm-up begins with next to all.

    None: the capacity fraction, throughout.
    """
    return Fraction(1) if config.depth is not None and config.depth.warmup_fraction else None


def memory_per_rank(run: RunConfig, world_size: int, zero_stage: int | None = None) -> RankMemory:
    """Bytes per rank in training; of `zero_stage` instead of the configured one if given."""
    config = run.mode
    ep_size = config.experts.ep_size if config.experts is not None else 1
    if world_size % ep_size:
        raise ConfigError("mode.experts.ep_size", f"is {ep_size}, which does not divide the {world_size} ranks")
    rows, _ = run.engine.batch_layout(world_size)
    zero = ZeroSettings.read(run)
    if zero_stage is not None:
        zero = dataclasses.replace(zero, stage=zero_stage)
    experts = num_expert_parameters(config)
    element_size = ELEMENT_SIZE[zero.precision]
    return dataclasses.replace(
        state_memory(num_parameters(config) - experts, experts, world_size, ep_size, zero),
        activations=activation_bytes(
            config, expected_counts(config, rows, capacity_fraction=largest_capacity_fraction(config)), element_size
        ),
        logits=logits_bytes(config, rows, config.model.sequence_length, element_size),
    )
