"""What a configuration costs, as exact integers: capacities, routed tokens, parameters, FLOPs, bytes.

All of it follows from a `ModeConfig` and one `BlockCounts` per block. The counts are either expected
(`expected_counts`, before a machine is booked) or counted from the routes a batch really took; every
formula takes both alike.

FLOPs are those of matrix products, 2 per multiply-add. Norms, softmax, rotary positions, activation
functions and the embedding lookup are left out, as torch's FlopCounterMode leaves them out.

Letters in comments: B rows, L tokens per row, S slots per row, T tokens, D width, F feed-forward width,
N query heads, G key/value heads, H head width, V vocabulary, E experts, Z no-ops, J = E + Z, K choices
per token, R processed assignments, P predictor width, W expert-parallel ranks.

This file knows numbers only. It imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mode.config import ModeConfig, exact
from mode.config_file import RunConfig
from mode.memory import ELEMENT_SIZE as ELEMENT_SIZE
from mode.memory import FP32
from mode.memory import RankMemory as RankMemory
from mode.memory import ZeroSettings as ZeroSettings
from mode.memory import state_memory as state_memory
from mode.section import ConfigError

# ---------------------------------------------------------------------------------------------------
# Capacities


def depth_capacity(fraction: float, length: int) -> int:
    """C, how many of `length` tokens a routed block keeps: ceil(fraction x length), in exact decimals."""
    return math.ceil(exact(fraction) * length)


def expert_capacity(capacity_factor: float, top_k: int, tokens: int, no_op_fraction: float, num_experts: int) -> int:
    """How many assignments of `tokens` tokens on a rank one real expert takes, in exact decimals."""
    return math.ceil(exact(capacity_factor) * top_k * tokens * (1 - exact(no_op_fraction)) / num_experts)


# ---------------------------------------------------------------------------------------------------
# Counts: what a block did, or is expected to do, with one batch


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
    config: ModeConfig, layer: int, rows: int, length: int | None = None, training: bool = True
) -> BlockCounts:
    """What block `layer` does with `rows` sequences when every column gets exactly its target share.

    Evaluation (`training=False`) is dropless. Under token_choice the kept share is the capacity.
    """
    length = config.model.sequence_length if length is None else length
    slots = length
    if config.depth is not None and config.is_routed(layer):
        slots = depth_capacity(config.depth.capacity_fraction, length)
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
    config: ModeConfig, rows: int, length: int | None = None, training: bool = True
) -> list[BlockCounts]:
    """`expected_block_counts` of every block."""
    return [expected_block_counts(config, layer, rows, length, training) for layer in range(config.model.num_layers)]


def _check_conserved(config: ModeConfig, layer: int, counts: BlockCounts) -> None:
    """Refuses counts that lost or invented an assignment: FLOPs derived from them would be wrong."""
    choices = 0 if config.experts is None else counts.tokens * config.experts.top_k
    if counts.assignments != choices:
        raise ValueError(
            f"block {layer}: {counts.processed} processed + {counts.no_op} no-op + {counts.dropped} dropped "
            f"assignments; {counts.tokens} tokens make {choices}"
        )


def _check_blocks(config: ModeConfig, counts: Sequence[BlockCounts]) -> None:
    if len(counts) != config.model.num_layers:
        raise ValueError(f"counts of {len(counts)} blocks for a model of {config.model.num_layers}")
    if len({(block.rows, block.length) for block in counts}) > 1:
        raise ValueError("the blocks' counts come from batches of different shapes")


# ---------------------------------------------------------------------------------------------------
# Parameters


def _one_expert(config: ModeConfig) -> int:
    assert config.experts is not None
    return 3 * config.model.width * config.experts.width


def block_parameters(config: ModeConfig, layer: int) -> dict[str, int]:
    """Parameters of block `layer` by group, all experts counted. No-ops own nothing but router columns."""
    model, depth, experts = config.model, config.depth, config.experts
    groups = {"norms": 2 * model.width}
    groups["attention"] = 2 * model.width * model.head_width * (model.num_heads + model.num_kv_heads)
    if depth is not None and config.is_routed(layer):
        if depth.selection != "stochastic":
            groups["depth_router"] = model.width
        if depth.predictor is not None:
            groups["predictor"] = depth.predictor.width * (model.width + 2) + 1  # two layers with biases
    if experts is None:
        groups["feed_forward"] = 3 * model.width * model.ffn_width
    else:
        groups["expert_router"] = experts.num_columns * model.width
        groups["experts"] = experts.num_experts * _one_expert(config)
        if experts.num_shared:
            groups["shared_experts"] = experts.num_shared * _one_expert(config)
    return groups


def model_parameters(config: ModeConfig) -> dict[str, int]:
    """Parameters of the whole model by group."""
    model = config.model
    groups = {"embedding": model.vocab_size * model.width}
    if not model.tied_head:
        groups["head"] = model.vocab_size * model.width
    groups["norms"] = model.width
    for layer in range(model.num_layers):
        for group, parameters in block_parameters(config, layer).items():
            groups[group] = groups.get(group, 0) + parameters
    return groups


def num_parameters(config: ModeConfig) -> int:
    return sum(model_parameters(config).values())


def num_expert_parameters(config: ModeConfig) -> int:
    """Those that expert parallelism divides; shared experts are on every rank."""
    return model_parameters(config).get("experts", 0)


def active_block_parameters(config: ModeConfig, layer: int, counts: BlockCounts) -> dict[str, Fraction]:
    """Parameters of block `layer` a token uses, on the mean over the B*L tokens of the batch.

    The depth router and the predictor see every token; the rest of the block sees the kept share, and
    an expert counts once for each assignment it processes.
    """
    _check_conserved(config, layer, counts)
    batch = counts.rows * counts.length
    kept = Fraction(counts.tokens, batch)
    active: dict[str, Fraction] = {}
    for group, parameters in block_parameters(config, layer).items():
        if group == "experts":
            active[group] = Fraction(counts.processed * _one_expert(config), batch)
        elif group in ("depth_router", "predictor"):
            active[group] = Fraction(parameters)
        else:
            active[group] = kept * parameters
    return active


def active_parameters(config: ModeConfig, counts: Sequence[BlockCounts]) -> dict[str, Fraction]:
    """Parameters of the model a token uses, by group; the embedding counts whole, as is usual."""
    _check_blocks(config, counts)
    groups = model_parameters(config)
    active: dict[str, Fraction] = {name: Fraction(groups[name]) for name in ("embedding", "head") if name in groups}
    active["norms"] = Fraction(config.model.width)
    for layer, block in enumerate(counts):
        for group, parameters in active_block_parameters(config, layer, block).items():
            active[group] = active.get(group, Fraction(0)) + parameters
    return active


# ---------------------------------------------------------------------------------------------------
# FLOPs


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


def _product(forward: int) -> Flops:
    """A matrix product: backward is one more for the input and one for the weight."""
    return Flops(forward, 2 * forward)


def block_flops_by_part(config: ModeConfig, layer: int, counts: BlockCounts) -> dict[str, Flops]:
    """FLOPs of block `layer`.

    Attention scores are counted as the full S x S square, as FlopCounterMode counts them; a causal
    kernel may do half. Their backward is 2.5 times forward: flash-style kernels compute the scores again.
    The predictor stands behind a stop-gradient, so its first layer has no gradient to its input.
    With expert parallelism `experts` is the work this batch causes, on whichever rank it is done.
    """
    _check_conserved(config, layer, counts)
    model, depth, experts = config.model, config.depth, config.experts
    batch, slots, tokens = counts.rows * counts.length, counts.rows * counts.slots, counts.tokens
    parameters = block_parameters(config, layer)
    parts: dict[str, Flops] = {}
    if "depth_router" in parameters:
        parts["depth_router"] = _product(2 * batch * model.width)
    if depth is not None and "predictor" in parameters:
        assert depth.predictor is not None
        first, second = 2 * batch * model.width * depth.predictor.width, 2 * batch * depth.predictor.width
        parts["predictor"] = Flops(first, first) + _product(second)
    parts["attention_projections"] = _product(2 * slots * parameters["attention"])
    square = 2 * slots * counts.slots * model.num_heads * model.head_width
    parts["attention_scores"] = Flops(2 * square, 5 * square)
    if experts is None:
        parts["feed_forward"] = _product(2 * tokens * parameters["feed_forward"])
        return parts
    parts["expert_router"] = _product(2 * tokens * parameters["expert_router"])
    parts["experts"] = _product(2 * counts.processed * _one_expert(config))
    if experts.num_shared:
        parts["shared_experts"] = _product(2 * tokens * parameters["shared_experts"])
    return parts


def block_flops(config: ModeConfig, layer: int, counts: BlockCounts) -> Flops:
    return sum(block_flops_by_part(config, layer, counts).values(), Flops())


def head_flops(config: ModeConfig, rows: int, length: int) -> Flops:
    return _product(2 * rows * length * config.model.width * config.model.vocab_size)


def model_flops_by_part(config: ModeConfig, counts: Sequence[BlockCounts]) -> dict[str, Flops]:
    """FLOPs of the model on one batch, the blocks' parts summed over blocks, and the head."""
    _check_blocks(config, counts)
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
    _check_blocks(config, counts)
    if not config.model.activation_checkpointing:
        return 0
    return sum(block_flops(config, layer, block).forward for layer, block in enumerate(counts))


# ---------------------------------------------------------------------------------------------------
# The length of a run


def step_flops(run: RunConfig, world_size: int) -> int:
    """The training FLOPs an optimizer step is expected to take, over all ranks."""
    micro, accumulation = run.engine.batch_layout(world_size)
    return model_flops(run.mode, expected_counts(run.mode, micro)).training * accumulation * world_size


def num_steps(run: RunConfig, world_size: int) -> int:
    """Optimizer steps, from whichever of steps, tokens and flops is set: the nearest whole number, at least 1."""
    train, (micro, accumulation) = run.mode.train, run.engine.batch_layout(world_size)
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, round(train.tokens / (micro * accumulation * world_size * run.mode.model.sequence_length)))
    assert train.flops is not None
    return max(1, round(train.flops / step_flops(run, world_size)))


# ---------------------------------------------------------------------------------------------------
# Bytes sent


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


# ---------------------------------------------------------------------------------------------------
# Memory


def block_activation_bytes(config: ModeConfig, layer: int, counts: BlockCounts, element_size: int) -> int:
    """An estimate of what one block saves for backward, without activation checkpointing.

    It follows what autograd saves on a CPU; a fused norm on a GPU saves less.
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
        fp32_elements += batch * model.width  # the router's input
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
    _check_blocks(config, counts)
    blocks = [block_activation_bytes(config, layer, block, element_size) for layer, block in enumerate(counts)]
    if not config.model.activation_checkpointing:
        return sum(blocks)
    return sum(block.rows * block.length * config.model.width * element_size for block in counts) + max(blocks)


def logits_bytes(config: ModeConfig, rows: int, length: int, element_size: int) -> int:
    """An estimate: the logits, their fp32 log-softmax, and the fp32 gradients of both at once."""
    return rows * length * config.model.vocab_size * (element_size + 3 * FP32)


CACHE_CHUNK = 64  # slots a cache grows by: copying 1/128 of a cache per token, on the mean, is little beside reading it


def cache_slots(longest: int) -> int:
    """How many slots per row a block's key/value cache has when its fullest row holds `longest` tokens."""
    return math.ceil(longest / CACHE_CHUNK) * CACHE_CHUNK


def block_cache_bytes(config: ModeConfig, rows: int, longest: int, element_size: int) -> int:
    """Keys and values that sampling keeps for one block: of the tokens the block kept, sized by the fullest row."""
    model = config.model
    return 2 * rows * cache_slots(longest) * model.num_kv_heads * model.head_width * element_size


def cache_bytes(config: ModeConfig, counts: Sequence[BlockCounts], element_size: int) -> int:
    """The key/value cache of the model after a batch; `expected_counts` gives the one to expect."""
    _check_blocks(config, counts)
    return sum(block_cache_bytes(config, block.rows, block.slots, element_size) for block in counts)


def cache_bytes_saved(config: ModeConfig, counts: Sequence[BlockCounts], element_size: int) -> int:
    """How much larger the cache were if every block kept every token."""
    _check_blocks(config, counts)
    full = sum(block_cache_bytes(config, block.rows, block.length, element_size) for block in counts)
    return full - cache_bytes(config, counts, element_size)


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
        activations=activation_bytes(config, expected_counts(config, rows), element_size),
        logits=logits_bytes(config, rows, config.model.sequence_length, element_size),
    )
