"""What a configuration costs, as exact integers: capacities, routed tokens, parameters, FLOPs, bytes.

All of it follows from a `ModeConfig` and one `BlockCounts` per block. The counts are either expected
(`expected_counts`, before a machine is booked) or counted from the routes a batch really took; every
formula takes both alike. Imports go one way:

    counts <- parameters <- flops | memory (with states); counts <- communication; flops <- layers

Letters in comments: B rows, L tokens per row, S slots per row, T tokens, D width, F feed-forward width,
N query heads, G key/value heads, H head width, V vocabulary, E experts, Z no-ops, J = E + Z, K choices
per token, R processed assignments, P predictor width, W expert-parallel ranks.

This package knows numbers only. It imports neither torch nor DeepSpeed.
"""

from mode.accounting.communication import (
    all_to_all_bytes,
    all_to_alls_per_block,
    leaving_bytes,
)
from mode.accounting.counts import (
    BlockCounts,
    capacity_fraction_at,
    depth_capacity,
    expected_block_counts,
    expected_counts,
    expert_capacity,
    steps_by_capacity,
)
from mode.accounting.flops import (
    Flops,
    block_flops,
    block_flops_by_part,
    head_flops,
    model_flops,
    model_flops_by_part,
    num_steps,
    per_token,
    recompute_flops,
    run_flops,
    step_flops,
)
from mode.accounting.layers import LayerCosts, depth_layer_costs, expert_layer_costs
from mode.accounting.memory import (
    CACHE_CHUNK,
    activation_bytes,
    block_activation_bytes,
    block_cache_bytes,
    cache_bytes,
    cache_bytes_saved,
    cache_slots,
    largest_capacity_fraction,
    logits_bytes,
    memory_per_rank,
)
from mode.accounting.parameters import (
    active_block_parameters,
    active_parameters,
    block_parameters,
    model_parameters,
    num_expert_parameters,
    num_parameters,
)
from mode.accounting.states import (
    ELEMENT_SIZE,
    FP32,
    RankMemory,
    ZeroSettings,
    state_memory,
)

__all__ = [
    "BlockCounts",
    "CACHE_CHUNK",
    "ELEMENT_SIZE",
    "FP32",
    "Flops",
    "LayerCosts",
    "RankMemory",
    "ZeroSettings",
    "activation_bytes",
    "active_block_parameters",
    "active_parameters",
    "all_to_all_bytes",
    "all_to_alls_per_block",
    "block_activation_bytes",
    "block_cache_bytes",
    "block_flops",
    "block_flops_by_part",
    "block_parameters",
    "cache_bytes",
    "cache_bytes_saved",
    "cache_slots",
    "depth_capacity",
    "depth_layer_costs",
    "expected_block_counts",
    "expected_counts",
    "expert_capacity",
    "expert_layer_costs",
    "head_flops",
    "capacity_fraction_at",
    "leaving_bytes",
    "logits_bytes",
    "memory_per_rank",
    "model_flops",
    "model_flops_by_part",
    "model_parameters",
    "largest_capacity_fraction",
    "num_expert_parameters",
    "num_parameters",
    "num_steps",
    "per_token",
    "recompute_flops",
    "run_flops",
    "state_memory",
    "step_flops",
    "steps_by_capacity",
]
