"""Capacities and counts, against the slow way of counting each."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mode import accounting
from mode.accounting import BlockCounts
from mode.config.settings import DepthConfig, ModeConfig
from tests.accounting.models import configs, kept_fractions, tiny

fractions = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)


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
# The warm-up of the depth capacity


def warming(capacity_fraction: float, warmup_fraction: float) -> DepthConfig:
    return DepthConfig(capacity_fraction=capacity_fraction, warmup_fraction=warmup_fraction)


def test_the_kept_share_falls_evenly_to_the_capacity() -> None:
    shares = [accounting.capacity_fraction_at(warming(0.2, 0.4), step, num_steps=10) for step in range(10)]
    assert shares == [Fraction(4, 5), Fraction(3, 5), Fraction(2, 5), *[Fraction(1, 5)] * 7]


def test_without_a_warmup_every_step_keeps_the_capacity() -> None:
    assert {accounting.capacity_fraction_at(warming(0.07, 0), step, 9) for step in range(9)} == {Fraction(7, 100)}


@given(fractions, st.integers(0, 999), st.integers(0, 300), st.integers(1, 80))
@example(1.0, 500, 10, 8)
@example(0.125, 1, 3, 8)
def test_steps_by_capacity_are_those_counted_one_by_one(capacity: float, warmup: int, steps: int, length: int) -> None:
    depth = warming(capacity, warmup / 1000)
    shares = [accounting.capacity_fraction_at(depth, step, steps) for step in range(steps)]
    assert shares == sorted(shares, reverse=True)
    assert all(Fraction(str(capacity)) <= share <= 1 for share in shares)
    counted = Counter(accounting.depth_capacity(share, length) for share in shares)
    assert accounting.steps_by_capacity(depth, steps, length) == counted
