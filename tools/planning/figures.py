"""What a configuration will cost, as plain JSON values with exact integers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mode import accounting
from mode.config.file import RunConfig
from mode.config.settings import ModeConfig, exact

Plan = dict[str, Any]

FEW_ASSIGNMENTS = 8  # per expert and optimizer step: below it an expert's gradient is mostly noise
FAR_FROM_BUDGET = 0.1  # a share of it, by which whole steps may miss a budget before it is worth a warning
WEAK_BALANCE = 1.0  # a balance loss below this weight does not hold the no-op share near its target


def make_plan(file: str, run: RunConfig, world_size: int, memory_gb: float | None) -> Plan:
    config = run.mode
    rows, micro_batches = run.engine.batch_layout(world_size)
    counts = accounting.expected_counts(config, rows)
    blocks = [_block(run, layer, counts[layer], world_size * micro_batches) for layer in range(len(counts))]
    tokens_per_step = rows * config.model.sequence_length * micro_batches * world_size
    flops = _flops(config, counts, micro_batches * world_size)
    plan: Plan = {
        "file": file,
        "description": config.description,
        "layout": {
            "world_size": world_size,
            "ep_size": config.experts.ep_size if config.experts is not None else 1,
            "zero_stage": run.engine.zero_stage,
            "precision": run.engine.precision,
            "sequence_length": config.model.sequence_length,
            "rows_per_micro_batch": rows,
            "micro_batches_per_step": micro_batches,
            "tokens_per_step": tokens_per_step,
        },
        "run": _run_length(run, world_size, tokens_per_step),
        "blocks": blocks,
        "routing": {name: sum(block[name] for block in blocks) for name in _COUNTED},
        "parameters": _parameters(config, counts),
        "flops": flops,
        "communication": _communication(config, blocks, micro_batches),
        "memory": _memory(run, world_size, rows),
        "sampling": _sampling(run),
    }
    plan["warnings"] = list(_warnings(plan, run, memory_gb))
    return plan


_COUNTED = ("kept", "skipped", "assignments", "processed", "no_op", "dropped")


def _block(run: RunConfig, layer: int, counts: accounting.BlockCounts, batches_per_step: int) -> Plan:
    config, experts = run.mode, run.mode.experts
    flops = accounting.block_flops(config, layer, counts)
    capacity = None
    if experts is not None and experts.capacity_factor is not None:
        capacity = accounting.expert_capacity(
            experts.capacity_factor, experts.top_k, counts.tokens, experts.no_op_fraction, experts.num_experts
        )
    sent = accounting.all_to_all_bytes(config, counts, accounting.ELEMENT_SIZE[run.engine.precision])
    return {
        "layer": layer,
        "routed": config.is_routed(layer),
        "kept_per_sequence": counts.slots,
        "expert_capacity": capacity,
        **{name: getattr(counts, name) for name in _COUNTED},
        "assignments_per_expert_and_step": (
            None if experts is None else counts.processed * batches_per_step // experts.num_experts
        ),
        "parameters": sum(accounting.block_parameters(config, layer).values()),
        "active_parameters": round(sum(accounting.active_block_parameters(config, layer, counts).values())),
        "forward_flops": flops.forward,
        "training_flops": flops.training,
        "all_to_all_bytes": sent,
        "all_to_all_bytes_leaving": accounting.leaving_bytes(sent, experts.ep_size) if experts is not None else 0,
    }


def _parameters(config: ModeConfig, counts: Sequence[accounting.BlockCounts]) -> Plan:
    active = accounting.active_parameters(config, counts)
    return {
        "total": accounting.num_parameters(config),
        "active_per_token": round(sum(active.values())),
        "by_group": accounting.model_parameters(config),
        "active_by_group": {group: round(parameters) for group, parameters in active.items()},
    }


def _flops(config: ModeConfig, counts: Sequence[accounting.BlockCounts], batches_per_step: int) -> Plan:
    flops = accounting.model_flops(config, counts)
    recompute = accounting.recompute_flops(config, counts)
    parts = accounting.model_flops_by_part(config, counts)
    return {
        "forward_per_token": round(accounting.per_token(flops.forward, counts)),
        "training_per_token": round(accounting.per_token(flops.training, counts)),
        "forward_per_micro_batch": flops.forward,
        "backward_per_micro_batch": flops.backward,
        "recompute_per_micro_batch": recompute,
        "training_per_step": flops.training * batches_per_step,
        "recompute_per_step": recompute * batches_per_step,
        "training_per_micro_batch_by_part": {part: part_flops.training for part, part_flops in parts.items()},
    }


def _communication(config: ModeConfig, blocks: Sequence[Plan], micro_batches: int) -> Plan:
    per_block = accounting.all_to_alls_per_block(config)
    times = per_block * micro_batches
    return {
        "all_to_alls_per_step": times * len(blocks),
        "largest_all_to_all_bytes": max(block["all_to_all_bytes"] for block in blocks) if per_block else 0,
        "bytes_per_rank_and_step": times * sum(block["all_to_all_bytes"] for block in blocks),
        "bytes_leaving_per_rank_and_step": times * sum(block["all_to_all_bytes_leaving"] for block in blocks),
    }


def _memory(run: RunConfig, world_size: int, rows: int) -> Plan:
    memory = accounting.memory_per_rank(run, world_size)
    counts = accounting.expected_counts(
        run.mode, rows, capacity_fraction=accounting.largest_capacity_fraction(run.mode)
    )
    size = accounting.ELEMENT_SIZE[run.engine.precision]

    def activations(checkpointing: bool) -> int:
        model = dataclasses.replace(run.mode.model, activation_checkpointing=checkpointing)
        return accounting.activation_bytes(dataclasses.replace(run.mode, model=model), counts, size)

    return {
        **dataclasses.asdict(memory),
        "total": memory.total,
        "activations_with_checkpointing": activations(True),
        "activations_without_checkpointing": activations(False),
        "total_by_zero_stage": [accounting.memory_per_rank(run, world_size, stage).total for stage in range(4)],
    }


def _sampling(run: RunConfig) -> Plan:
    """The key/value cache of one row of the full sequence length, if causal routing keeps what training keeps."""
    counts = accounting.expected_counts(run.mode, rows=1, training=False)
    size = accounting.ELEMENT_SIZE[run.engine.precision]
    return {
        "cache_bytes": accounting.cache_bytes(run.mode, counts, size),
        "cache_bytes_saved": accounting.cache_bytes_saved(run.mode, counts, size),
    }


def _run_length(run: RunConfig, world_size: int, tokens_per_step: int) -> Plan:
    steps = accounting.num_steps(run, world_size)
    flops = accounting.run_flops(run, world_size, steps)
    depth = run.mode.depth
    warmup = 0 if depth is None else math.ceil(exact(depth.warmup_fraction) * steps)
    return {"steps": steps, "warmup_steps": warmup, "tokens": steps * tokens_per_step, "training_flops": flops}


def _warnings(plan: Plan, run: RunConfig, memory_gb: float | None) -> Iterator[str]:
    for routed in (False, True):
        block = first_block(plan, routed)
        if block is None:
            continue
        name = "routed" if routed else "plain"
        if routed and block["kept_per_sequence"] == 1:
            yield "a routed block keeps one token per sequence: its attention has nothing to attend to"
        share = block["assignments_per_expert_and_step"]
        if share is not None and share < FEW_ASSIGNMENTS:
            yield (
                f"an expert of a {name} block will see about {share} assignments per step; below {FEW_ASSIGNMENTS} "
                "its gradient is mostly noise: use fewer experts or a larger batch"
            )
    missed = missed_budget(run, plan["layout"]["world_size"])
    if missed is not None:
        yield missed
    experts, depth = run.mode.experts, run.mode.depth
    if experts is not None and experts.num_no_ops and experts.balance_bias is None:
        weight = experts.balance_loss.weight if experts.balance_loss is not None else 0.0
        if weight < WEAK_BALANCE:
            yield (
                f"the no-op share of {experts.no_op_fraction:g} is held by a balance loss of weight {weight:g} alone; "
                f"below {WEAK_BALANCE:g} the share drifts, and the work with it: set mode.experts.balance_bias"
            )
    if experts is not None and 0 < experts.num_no_ops <= experts.no_op_fraction * experts.top_k:
        yield (
            f"no token has a choice about no-ops: a share of {experts.no_op_fraction:g} of {experts.top_k} distinct "
            f"choices is {experts.num_no_ops} no-op column(s) for every token: raise mode.experts.num_no_ops"
        )
    if depth is not None and depth.selection == "learned" and depth.predictor is None and depth.aux_loss is None:
        yield "neither depth.predictor nor depth.aux_loss is set: nothing trains the decisions that sampling will need"
    total = plan["memory"]["total"]
    if memory_gb is not None and total > memory_gb * 1e9:
        yield f"about {total / 1e9:.1f} GB per rank, beyond the {memory_gb:g} GB of --memory_gb"
    zero = run.deepspeed.get("zero_optimization", {})
    for offload in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(offload), dict) and zero[offload].get("device") != "none":
            yield f"zero_optimization.{offload} is set; memory is counted as if nothing were offloaded"
    optimizer = run.deepspeed.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    if isinstance(kind, str) and kind.lower() not in ("adam", "adamw"):
        yield f'optimizer.type is "{kind}"; memory is counted as for Adam'


def first_block(plan: Plan, routed: bool) -> Plan | None:
    """One block of a kind; by expectation all blocks of a kind are alike."""
    return next((block for block in plan["blocks"] if block["routed"] is routed), None)


def missed_budget(run: RunConfig, world_size: int) -> str | None:
    """A warning if whole steps miss the run's tokens or FLOPs by much, as when one step takes more than all of them."""
    train = run.mode.train
    name = next((name for name in ("tokens", "flops") if getattr(train, name) is not None), None)
    if name is None:
        return None
    asked = getattr(train, name)
    steps, (micro, accumulation) = accounting.num_steps(run, world_size), run.engine.batch_layout(world_size)
    tokens = micro * accumulation * world_size * run.mode.model.sequence_length
    each = tokens if name == "tokens" else accounting.step_flops(run, world_size)
    takes = steps * tokens if name == "tokens" else accounting.run_flops(run, world_size, steps)
    share = takes / asked - 1
    if abs(share) <= FAR_FROM_BUDGET:
        return None
    unit = "FLOPs" if name == "flops" else name
    return (
        f"mode.train.{name} is {asked:.4g}; a step takes {each:.4g}, so the run has {steps} of them and "
        f"{takes:.4g} {unit}, {share:+.0%}: use a larger budget or a smaller batch"
    )
