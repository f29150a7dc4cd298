"""Parameters, FLOPs and bytes sent, against lists of every matrix and every product.

That the formulas equal what torch counts in the real model is in test_flops.py.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mode import accounting
from mode.accounting import BlockCounts, Flops
from mode.config.file import RunConfig, run_config_from_dict
from mode.config.settings import ModeConfig
from tests.accounting.models import configs, configs_with_counts, tiny

ROOT = Path(__file__).parent.parent.parent


def shapes(config: ModeConfig, layer: int) -> list[tuple[int, ...]]:
    """Every parameter of a block."""
    model, width = config.model, config.model.width
    query, key = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    found: list[tuple[int, ...]] = [(width,), (width,), (query, width), (key, width), (key, width), (width, query)]
    found += [(query,), (key,), (key,)] * model.qkv_bias
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
# Independence


def test_accounting_imports_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys; from mode import accounting; accounting.depth_capacity(0.07, 100); "
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---------------------------------------------------------------------------------------------------
# The length of a run whose routed blocks keep more at first


def warming_up(warmup: float, train: dict[str, float]) -> RunConfig:
    parts = {
        "model": tiny().model.to_dict() | {"num_layers": 5},
        "experts": {"num_experts": 4, "top_k": 2, "width": 16, "num_no_ops": 1, "no_op_fraction": 0.3},
        "depth": {"capacity_fraction": 0.25, "warmup_fraction": warmup, "predictor": {"width": 3}},
    }
    return run_config_from_dict({"train_batch_size": 4, "mode": {**parts, "train": train}})


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_the_flops_of_a_run_are_those_of_its_steps(warmup: float, steps: int) -> None:
    run = warming_up(warmup, {"steps": steps})
    depth = run.mode.depth
    assert depth is not None
    shares = [accounting.capacity_fraction_at(depth, step, steps) for step in range(steps)]
    assert accounting.run_flops(run, 2, steps) == sum(accounting.step_flops(run, 2, share) for share in shares)
    assert accounting.step_flops(run, 2, shares[-1]) == accounting.step_flops(run, 2)


@pytest.mark.parametrize("warmup", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("asked", [0.2, 3.4, 57.7])
def test_a_flops_budget_makes_the_number_of_steps_that_comes_nearest(warmup: float, asked: float) -> None:
    budget = asked * accounting.step_flops(warming_up(warmup, {"steps": 1}), 1)
    run = warming_up(warmup, {"flops": budget})
    nearest = min(range(1, 80), key=lambda steps: abs(accounting.run_flops(run, 1, steps) - budget))
    assert accounting.num_steps(run, 1) == nearest


def test_memory_is_that_of_the_steps_that_keep_most() -> None:
    kept = [accounting.memory_per_rank(warming_up(warmup, {"steps": 9}), 1).activations for warmup in (0.0, 0.5)]
    mode = warming_up(0.0, {"steps": 9}).mode
    assert mode.depth is not None
    full = dataclasses.replace(mode, depth=dataclasses.replace(mode.depth, capacity_fraction=1.0))
    assert kept[0] < kept[1] == accounting.activation_bytes(full, accounting.expected_counts(full, 4), 4)
