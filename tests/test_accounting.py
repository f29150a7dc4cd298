"""Capacities, counts, parameters, FLOPs, bytes and memory, against the slow way of counting each.

That the formulas equal what torch counts in the real model is in test_flops.py.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mode import accounting
from mode.accounting import BlockCounts, Flops, ZeroSettings
from mode.config import ModeConfig
from mode.config_file import load_config, run_config_from_dict
from mode.model.transformer import ModeTransformer
from mode.section import ConfigError

ROOT = Path(__file__).parent.parent

fractions = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


@st.composite
def configs(draw: st.DrawFn, experts: bool | None = None, depth: bool | None = None) -> ModeConfig:
    """Any kind of small model: dense or with experts, routed in depth or not, as `experts` and `depth` ask."""
    head_width, num_kv_heads = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    num_layers, length = draw(st.integers(1, 5)), draw(st.integers(2, 200))
    tree: dict[str, Any] = {
        "model": {
            "vocab_size": draw(st.integers(2, 100)),
            "num_layers": num_layers,
            "width": num_heads * head_width,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_width": draw(st.integers(1, 40)),
            "sequence_length": length,
            "tied_head": draw(st.booleans()),
            "activation_checkpointing": draw(st.booleans()),
        }
    }
    if draw(st.booleans()) if experts is None else experts:
        tree["experts"] = draw(experts_sections())
    if draw(st.booleans()) if depth is None else depth:
        selection = draw(st.sampled_from(["learned", "stochastic", "token_choice"]))
        tree["depth"] = {
            "capacity_fraction": draw(kept_fractions(length)),
            "every": draw(st.integers(1, num_layers)),
            "selection": selection,
            "predictor": {"width": draw(st.integers(1, 9))} if selection == "learned" and draw(st.booleans()) else None,
        }
    return ModeConfig.from_dict(tree)


@st.composite
def experts_sections(draw: st.DrawFn) -> dict[str, Any]:
    num_experts, num_no_ops = draw(st.integers(1, 8)), draw(st.integers(0, 4))
    top_k = draw(st.integers(1, min(4, num_experts)))  # at most E, so that any small no-op share can be reached
    thousandths = draw(st.integers(1, min(999, 1000 * num_no_ops // top_k))) if num_no_ops else 0
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "width": draw(st.integers(1, 40)),
        "num_no_ops": num_no_ops,
        "no_op_fraction": thousandths / 1000,
        "capacity_factor": draw(st.none() | st.integers(1, 3000).map(lambda value: value / 1000)),
        "num_shared": draw(st.integers(0, 2)),
        "backend": "loop",  # takes any width
    }


def kept_fractions(length: int) -> st.SearchStrategy[float]:
    """Capacity fractions that keep at least one of `length` tokens."""
    return st.integers(math.ceil(1000 / length), 1000).map(lambda thousandths: thousandths / 1000)


@st.composite
def configs_with_counts(draw: st.DrawFn) -> tuple[ModeConfig, list[BlockCounts]]:
    """A model, and routes that conserve tokens and assignments but are otherwise arbitrary."""
    config, rows = draw(configs()), draw(st.integers(1, 4))
    length = config.model.sequence_length
    counts = []
    for layer in range(config.model.num_layers):
        slots = draw(st.integers(0, length)) if config.is_routed(layer) else length
        tokens = draw(st.integers(0, rows * slots)) if config.is_routed(layer) else rows * slots
        choices = tokens * config.experts.top_k if config.experts is not None else 0
        processed = draw(st.integers(0, choices))
        no_op = draw(st.integers(0, choices - processed))
        counts.append(BlockCounts(rows, length, slots, tokens, processed, no_op, choices - processed - no_op))
    return config, counts


# ---------------------------------------------------------------------------------------------------
# Capacities


@given(fractions, st.integers(1, 10_000))
@example(0.07, 100)
@example(1.0, 7)
def test_depth_capacity_is_the_smallest_integer_not_below_the_decimal_share(fraction: float, length: int) -> None:
    share = Decimal(str(fraction)) * length  # a decimal of at most 7 digits: exact
    capacity = accounting.depth_capacity(fraction, length)
    assert capacity - 1 < share <= capacity


@pytest.mark.parametrize(
    ("fraction", "length", "capacity"),
    [(0.07, 100, 7), (0.14, 50, 7), (0.29, 100, 29), (0.55, 100, 55), (0.125, 256, 32), (0.1, 3, 1), (1.0, 9, 9)],
)
def test_depth_capacity_is_exact_where_floats_are_not(fraction: float, length: int, capacity: int) -> None:
    assert accounting.depth_capacity(fraction, length) == capacity


def test_the_exact_capacity_differs_from_a_float_ceil() -> None:
    assert math.ceil(0.07 * 100) == 8
    assert math.ceil(1.1 * 2 * 50 * 1.0 / 10) == 12
    assert accounting.expert_capacity(1.1, 2, 50, 0.0, 10) == 11


@given(fractions, st.integers(1, 10_000))
def test_depth_capacity_is_between_one_and_the_length(fraction: float, length: int) -> None:
    assert 1 <= accounting.depth_capacity(fraction, length) <= length


@given(fractions, fractions, st.integers(1, 10_000), st.integers(1, 10_000))
def test_depth_capacity_is_monotone_in_fraction_and_length(first: float, second: float, short: int, long: int) -> None:
    low, high = sorted([first, second])
    few, many = sorted([short, long])
    assert accounting.depth_capacity(low, few) <= accounting.depth_capacity(high, few)
    assert accounting.depth_capacity(low, few) <= accounting.depth_capacity(low, many)


@given(st.integers(1, 3000), st.integers(1, 4), st.integers(0, 5000), st.integers(0, 99), st.integers(1, 64))
def test_expert_capacity_is_the_smallest_integer_not_below_the_decimal_share(
    thousandths: int, top_k: int, tokens: int, percent: int, num_experts: int
) -> None:
    capacity = accounting.expert_capacity(thousandths / 1000, top_k, tokens, percent / 100, num_experts)
    share = thousandths * top_k * tokens * (100 - percent)  # over 100,000 x num_experts: integers throughout
    assert (capacity - 1) * 100_000 * num_experts < share <= capacity * 100_000 * num_experts or capacity == share == 0


# ---------------------------------------------------------------------------------------------------
# Counts


@given(configs(), st.integers(1, 8), st.booleans())
def test_every_assignment_is_processed_no_op_or_dropped_in_every_layer(
    config: ModeConfig, rows: int, training: bool
) -> None:
    for counts in accounting.expected_counts(config, rows, training=training):
        top_k = config.experts.top_k if config.experts is not None else 0
        assert counts.processed + counts.no_op + counts.dropped == counts.tokens * top_k
        assert min(counts.processed, counts.no_op, counts.dropped) >= 0


@given(configs(), st.integers(1, 8))
def test_every_token_is_kept_or_skipped_in_every_layer(config: ModeConfig, rows: int) -> None:
    length = config.model.sequence_length
    for layer, counts in enumerate(accounting.expected_counts(config, rows)):
        assert counts.kept + counts.skipped == rows * length
        assert 1 <= counts.slots <= length
        assert counts.kept == rows * counts.slots
        if not config.is_routed(layer):
            assert counts.skipped == 0


@given(configs(depth=True), st.data(), st.integers(1, 8))
def test_a_larger_fraction_never_keeps_fewer_tokens_nor_costs_fewer_flops(
    config: ModeConfig, data: st.DataObject, rows: int
) -> None:
    assert config.depth is not None
    fraction = data.draw(kept_fractions(config.model.sequence_length))
    other = dataclasses.replace(config, depth=dataclasses.replace(config.depth, capacity_fraction=fraction))
    small, large = (config, other) if config.depth.capacity_fraction <= fraction else (other, config)
    few, many = accounting.expected_counts(small, rows), accounting.expected_counts(large, rows)
    assert all(a.kept <= b.kept and a.processed <= b.processed for a, b in zip(few, many, strict=True))
    assert accounting.model_flops(small, few).training <= accounting.model_flops(large, many).training


@given(configs(experts=True), st.integers(1, 8))
def test_the_no_op_share_is_the_nearest_integer_to_the_target(config: ModeConfig, rows: int) -> None:
    assert config.experts is not None
    for counts in accounting.expected_counts(config, rows):
        target = Decimal(str(config.experts.no_op_fraction)) * counts.assignments
        assert abs(counts.no_op - target) <= Decimal("0.5")


@given(configs(), st.integers(1, 8))
def test_dropping_happens_in_training_only_and_only_beyond_capacity(config: ModeConfig, rows: int) -> None:
    training, evaluation = (accounting.expected_counts(config, rows, training=flag) for flag in (True, False))
    for trained, evaluated in zip(training, evaluation, strict=True):
        assert evaluated.dropped == 0
        assert evaluated.processed == trained.processed + trained.dropped
        if config.experts is None or config.experts.capacity_factor is None:
            assert trained.dropped == 0
        elif trained.dropped:
            capacity = accounting.expert_capacity(
                config.experts.capacity_factor,
                config.experts.top_k,
                trained.tokens,
                config.experts.no_op_fraction,
                config.experts.num_experts,
            )
            assert trained.processed == capacity * config.experts.num_experts


@pytest.mark.parametrize(
    "fields",
    [(2, 8, 9, 16), (2, 8, 4, 9), (2, 8, -1, 0), (2, 8, 4, 8, -1)],
    ids=["more slots than tokens", "more tokens than slots", "negative slots", "negative assignments"],
)
def test_impossible_counts_are_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        BlockCounts(*fields)


def test_counts_that_lost_an_assignment_are_refused() -> None:
    config = tiny(experts={"num_experts": 4, "top_k": 2, "width": 8})
    with pytest.raises(ValueError, match="block 0: 15 processed"):
        accounting.block_flops(config, 0, BlockCounts(1, 8, 8, 8, processed=15))


def test_counts_of_the_wrong_number_of_blocks_are_refused() -> None:
    config = tiny()
    with pytest.raises(ValueError, match="1 blocks for a model of 2"):
        accounting.model_flops(config, accounting.expected_counts(config, 1)[:1])


# ---------------------------------------------------------------------------------------------------
# Parameters and FLOPs, against lists of every matrix and every product


def tiny(**parts: Any) -> ModeConfig:
    model = {
        "vocab_size": 10,
        "num_layers": 2,
        "width": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_width": 12,
        "sequence_length": 8,
    }
    return ModeConfig.from_dict({"model": model, **parts})


def shapes(config: ModeConfig, layer: int) -> list[tuple[int, ...]]:
    """Every parameter of a block."""
    model, width = config.model, config.model.width
    query, key = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    found: list[tuple[int, ...]] = [(width,), (width,), (query, width), (key, width), (key, width), (width, query)]
    if config.depth is not None and config.is_routed(layer):
        if config.depth.selection != "stochastic":
            found += [(1, width)]
        if config.depth.predictor is not None:
            inner = config.depth.predictor.width
            found += [(inner, width), (inner,), (1, inner), (1,)]
    if config.experts is None:
        return [*found, (model.ffn_width, width), (width, model.ffn_width), (model.ffn_width, width)]
    experts = config.experts
    found += [(experts.num_experts + experts.num_no_ops, width)]
    for _ in range(experts.num_experts):
        found += [(experts.width, width), (width, experts.width), (experts.width, width)]
    shared = experts.num_shared * experts.width
    return [*found, (shared, width), (width, shared), (shared, width)]


def products(config: ModeConfig, layer: int, counts: BlockCounts) -> list[tuple[int, int, int, Fraction]]:
    """Every matrix product of a block's forward: [m, k] by [k, n], and what backward costs relative to it."""
    model, width, two = config.model, config.model.width, Fraction(2)
    query, key = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    batch, slots, tokens = counts.rows * counts.length, counts.rows * counts.slots, counts.tokens
    found = []
    if config.depth is not None and config.is_routed(layer):
        if config.depth.selection != "stochastic":
            found += [(batch, width, 1, two)]
        if config.depth.predictor is not None:
            inner = config.depth.predictor.width
            found += [(batch, width, inner, Fraction(1)), (batch, inner, 1, two)]
    found += [
        (slots, width, query, two),
        (slots, width, key, two),
        (slots, width, key, two),
        (slots, query, width, two),
    ]
    for _ in range(counts.rows * model.num_heads):  # scores, then values, of each head of each row
        found += [(counts.slots, model.head_width, counts.slots, Fraction(5, 2))] * 2
    if config.experts is None:
        return [*found, *swiglu(tokens, width, model.ffn_width)]
    experts = config.experts
    found += [(tokens, width, experts.num_experts + experts.num_no_ops, two)]
    found += swiglu(counts.processed, width, experts.width)
    return [*found, *swiglu(tokens, width, experts.num_shared * experts.width)]


def swiglu(tokens: int, width: int, inner: int) -> list[tuple[int, int, int, Fraction]]:
    return [(tokens, width, inner, Fraction(2))] * 2 + [(tokens, inner, width, Fraction(2))]


@given(configs())
def test_parameters_equal_the_sum_over_all_matrices(config: ModeConfig) -> None:
    blocks = [sum(math.prod(shape) for shape in shapes(config, layer)) for layer in range(config.model.num_layers)]
    for layer, expected in enumerate(blocks):
        assert sum(accounting.block_parameters(config, layer).values()) == expected
    outside = config.model.vocab_size * config.model.width * (1 if config.model.tied_head else 2) + config.model.width
    assert accounting.num_parameters(config) == sum(blocks) + outside


@given(configs_with_counts())
def test_flops_equal_the_sum_over_all_products_for_any_routes(case: tuple[ModeConfig, list[BlockCounts]]) -> None:
    config, counts = case
    total = Flops()
    for layer, block in enumerate(counts):
        listed = products(config, layer, block)
        forward = sum(2 * m * k * n for m, k, n, _ in listed)
        backward = sum(2 * m * k * n * ratio for m, k, n, ratio in listed)
        assert accounting.block_flops(config, layer, block) == Flops(forward, int(backward))
        total += accounting.block_flops(config, layer, block)
    head = 2 * counts[0].rows * counts[0].length * config.model.width * config.model.vocab_size
    assert accounting.model_flops(config, counts) == total + Flops(head, 2 * head)
    recomputed = total.forward if config.model.activation_checkpointing else 0
    assert accounting.recompute_flops(config, counts) == recomputed


def test_the_flops_of_a_dense_block_worked_by_hand() -> None:
    # 16 tokens of width 8 in 2 rows. q and o: 8x8, k and v: 4x8; 2 heads of 4; feed-forward 3 matrices of 12x8.
    flops = accounting.block_flops_by_part(tiny(), 0, accounting.expected_block_counts(tiny(), 0, rows=2))
    assert flops == {
        "attention_projections": Flops(2 * 16 * 192, 4 * 16 * 192),
        "attention_scores": Flops(4 * 2 * 2 * 8 * 8 * 4, 10 * 2 * 2 * 8 * 8 * 4),
        "feed_forward": Flops(2 * 16 * 288, 4 * 16 * 288),
    }


def test_no_ops_own_nothing_but_router_columns() -> None:
    experts = {"num_experts": 4, "top_k": 1, "width": 8}
    without, with_three = tiny(experts=experts), tiny(experts=experts | {"num_no_ops": 3, "no_op_fraction": 0.5})
    assert accounting.num_parameters(with_three) - accounting.num_parameters(without) == 2 * 3 * 8


# ---------------------------------------------------------------------------------------------------
# Active parameters


@given(configs_with_counts())
def test_active_parameters_are_what_each_token_uses_summed_and_divided(
    case: tuple[ModeConfig, list[BlockCounts]],
) -> None:
    config, counts = case
    batch = counts[0].rows * counts[0].length
    used = batch * (sum(shared_with_every_token(config)) + config.model.width)
    for layer, block in enumerate(counts):
        groups = accounting.block_parameters(config, layer)
        experts = groups.pop("experts", 0)
        always = groups.pop("depth_router", 0) + groups.pop("predictor", 0)
        used += batch * always + block.tokens * sum(groups.values())
        if config.experts is not None:
            used += block.processed * experts // config.experts.num_experts
    assert sum(accounting.active_parameters(config, counts).values()) * batch == used


def shared_with_every_token(config: ModeConfig) -> list[int]:
    return [config.model.vocab_size * config.model.width] * (1 if config.model.tied_head else 2)


def test_every_parameter_of_a_dense_model_is_active() -> None:
    config = tiny()
    active = accounting.active_parameters(config, accounting.expected_counts(config, 3))
    assert active == accounting.model_parameters(config)


# ---------------------------------------------------------------------------------------------------
# Bytes sent


def test_an_all_to_all_carries_the_processed_assignments_and_nothing_else() -> None:
    config = tiny(experts={"num_experts": 4, "top_k": 2, "width": 8, "num_no_ops": 2, "no_op_fraction": 0.5})
    counts = BlockCounts(2, 8, 8, 16, processed=11, no_op=17, dropped=4)
    assert accounting.all_to_all_bytes(config, counts, element_size=2) == 11 * 8 * 2


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_the_share_that_leaves_a_rank_is_that_of_the_other_ranks(sent: int, ep_size: int) -> None:
    leaving = accounting.leaving_bytes(sent, ep_size)
    assert abs(leaving * ep_size - sent * (ep_size - 1)) * 2 <= ep_size
    assert leaving == 0 if ep_size == 1 else leaving <= sent


@pytest.mark.parametrize(
    ("ep_size", "checkpointing", "expected"), [(1, False, 0), (1, True, 0), (2, False, 4), (4, True, 6)]
)
def test_all_to_alls_per_block(ep_size: int, checkpointing: bool, expected: int) -> None:
    config = tiny(experts={"num_experts": 4, "top_k": 1, "width": 8, "ep_size": ep_size})
    model = dataclasses.replace(config.model, activation_checkpointing=checkpointing)
    assert accounting.all_to_alls_per_block(dataclasses.replace(config, model=model)) == expected
    assert accounting.all_to_alls_per_block(tiny()) == 0


# ---------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("stage", "precision", "bytes_per_parameter"),
    [
        # Counted in DeepSpeed 0.19.8 on 2 ranks, as bytes per parameter: storages alive after backward.
        (0, "fp32", 16.0),
        (0, "bf16", 16.0),
        (1, "fp32", 14.0),
        (1, "bf16", 10.0),
        (2, "fp32", 12.0),
        (2, "bf16", 9.0),
        (3, "fp32", 10.0),
        (3, "bf16", 8.0),
    ],
)
def test_state_memory_is_what_deepspeed_holds_on_two_ranks(
    stage: int, precision: str, bytes_per_parameter: float
) -> None:
    zero = ZeroSettings(stage, precision, gradient_precision=precision)
    memory = accounting.state_memory(replicated=1 << 20, experts=0, world_size=2, ep_size=1, zero=zero)
    assert memory.states == bytes_per_parameter * (1 << 20)


def test_experts_are_divided_by_ep_and_partitioned_over_the_ranks_that_share_them() -> None:
    zero = ZeroSettings(3, "bf16", gradient_precision="bf16")
    memory = accounting.state_memory(replicated=1600, experts=6400, world_size=16, ep_size=4, zero=zero)
    part = 1600 // 16 + 6400 // 4 // 4
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * part, 2 * part, 12 * part)


def test_without_data_parallel_ranks_zero_leaves_an_expert_whole() -> None:
    zero = ZeroSettings(2, "bf16", gradient_precision="bf16")
    memory = accounting.state_memory(replicated=0, experts=800, world_size=8, ep_size=8, zero=zero)
    assert memory.states == 100 * (2 + 2 + 12)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from([(1, 1), (4, 1), (8, 4), (64, 8)]))
def test_a_higher_zero_stage_never_holds_more(replicated: int, expert_units: int, ranks: tuple[int, int]) -> None:
    world_size, ep_size = ranks
    for precision in ("bf16", "fp16"):
        states = [
            accounting.state_memory(
                replicated, expert_units * ep_size, world_size, ep_size, ZeroSettings(stage, precision, precision)
            ).states
            for stage in range(4)
        ]
        assert states == sorted(states, reverse=True)


def document(**deepspeed: Any) -> dict[str, Any]:
    mode = {"model": tiny().model.to_dict()}
    return {"train_batch_size": 4, "mode": mode, **deepspeed}


def test_memory_adds_states_and_activations_of_the_configured_stage() -> None:
    run = run_config_from_dict(
        document(zero_optimization={"stage": 2, "reduce_bucket_size": 5e2}, bf16={"enabled": True})
    )
    memory = accounting.memory_per_rank(run, world_size=2)
    counts = accounting.expected_counts(run.mode, rows=2)
    assert memory.buffers == 500 * 2
    assert memory.activations == accounting.activation_bytes(run.mode, counts, element_size=2)
    assert memory.logits == 2 * 8 * 10 * (2 + 12)
    assert memory.total == memory.states + 1000 + memory.activations + memory.logits
    assert accounting.memory_per_rank(run, world_size=2, zero_stage=0).parameters == 2 * accounting.num_parameters(
        run.mode
    )


@pytest.mark.parametrize(
    ("deepspeed", "path"),
    [
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "large"}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": -1}}, "stage3_max_live_parameters"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtype": ["fp32"]}}, "data_types.grad_accum_dtype"),
        ({"data_types": []}, "data_types"),
    ],
)
def test_a_deepspeed_setting_without_meaning_is_a_config_error(deepspeed: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        accounting.memory_per_rank(run_config_from_dict(document(**deepspeed)), world_size=1)


def test_checkpointing_keeps_block_inputs_and_one_block() -> None:
    config = tiny()
    counts = accounting.expected_counts(config, rows=3)
    one = accounting.block_activation_bytes(config, 0, counts[0], 4)
    assert accounting.activation_bytes(config, counts, 4) == 2 * one
    model = dataclasses.replace(config.model, activation_checkpointing=True)
    checkpointed = dataclasses.replace(config, model=model)
    assert accounting.activation_bytes(checkpointed, counts, 4) == 2 * 3 * 8 * 8 * 4 + one


@pytest.mark.parametrize("name", ["dense", "moe", "mode"])
@pytest.mark.parametrize("masking", [False, True], ids=["one document", "masked documents"])
def test_the_activation_estimate_is_near_what_autograd_saves(name: str, masking: bool) -> None:
    config = load_config(ROOT / "ds_configs" / f"{name}.json")
    data = dataclasses.replace(config.data, document_masking=masking)
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, sequence_length=512))
    model = ModeTransformer(config)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # by storage: many saved tensors are views of one

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(config.model.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(512).expand(2, -1) // 200 if masking else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(ids, documents=documents)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    estimate = accounting.activation_bytes(config, [record.counts() for record in out.routing], element_size=4)
    assert 0.9 < estimate / counted < 1.1


# ---------------------------------------------------------------------------------------------------
# Independence


def test_accounting_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from mode import accounting; accounting.depth_capacity(0.07, 100); "
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
