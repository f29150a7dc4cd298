"""Parameters by group: all of them, and those a token uses."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mode.accounting.counts import BlockCounts, check_blocks, check_conserved
from mode.config.settings import ModeConfig


def one_expert_parameters(config: ModeConfig) -> int:
    assert config.experts is not None
    return 3 * config.model.width * config.experts.width


def block_parameters(config: ModeConfig, layer: int) -> dict[str, int]:
    """Parameters of block `layer` by group, all experts counted. No-ops own nothing but router columns."""
    model, depth, experts = config.model, config.depth, config.experts
    groups = {"norms": 2 * model.width}
    groups["attention"] = model.width * (model.qkv_width + model.width)
    if model.qkv_bias:
        groups["qkv_bias"] = model.qkv_width
    if depth is not None and config.is_routed(layer):
        if depth.selection != "stochastic":
            groups["depth_router"] = model.width
        if depth.predictor is not None:
            groups["predictor"] = depth.predictor.width * (model.width + 2) + 1  # two layers with biases
    if experts is None:
        groups["feed_forward"] = 3 * model.width * model.ffn_width
    else:
        groups["expert_router"] = experts.num_columns * model.width
        groups["experts"] = experts.num_experts * one_expert_parameters(config)
        if experts.num_shared:
            groups["shared_experts"] = experts.num_shared * one_expert_parameters(config)
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
    check_conserved(config, layer, counts)
    batch = counts.rows * counts.length
    kept = Fraction(counts.tokens, batch)
    active: dict[str, Fraction] = {}
    for group, parameters in block_parameters(config, layer).items():
        if group == "experts":
            active[group] = Fraction(counts.processed * one_expert_parameters(config), batch)
        elif group in ("depth_router", "predictor"):
            active[group] = Fraction(parameters)
        else:
            active[group] = kept * parameters
    return active


def active_parameters(config: ModeConfig, counts: Sequence[BlockCounts]) -> dict[str, Fraction]:
    """Parameters of the model a token uses, by group; the embedding counts whole, as is usual."""
    check_blocks(config, counts)
    groups = model_parameters(config)
    active: dict[str, Fraction] = {name: Fraction(groups[name]) for name in ("embedding", "head") if name in groups}
    active["norms"] = Fraction(config.model.width)
    for layer, block in enumerate(counts):
        for group, parameters in active_block_parameters(config, layer, block).items():
            active[group] = active.get(group, Fraction(0)) + parameters
    return active
