"""The order of samples is a function of (seed, step); layouts only divide it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mode.data import TrainLoader, document_ids, spread_rows, validation_batches
from mode.data.checked import Tokens
from mode.data.loader import epoch_order, sample_rows


def make_rows(num_rows: int, length: int = 5) -> Tokens:
    """Rows that tell their number."""
    return (np.arange(num_rows)[:, None] * 100 + np.arange(length)).astype(np.uint16)


@given(
    num_rows=st.integers(1, 40),
    size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    num_micros=st.integers(1, 4),
    step=st.integers(0, 1000),
    seed=st.integers(0, 2**53),
)
def test_every_layout_covers_the_same_batch(
    num_rows: int, size: int, world_size: int, num_micros: int, step: int, seed: int
) -> None:
    total = size * world_size * num_micros
    loader = TrainLoader(make_rows(num_rows), global_batch_size=total, seed=seed)
    whole = loader.batch(step)
    parts = [
        loader.batch(step, rank=rank, world_size=world_size, micro=micro, num_micros=num_micros)
        for micro in range(num_micros)
        for rank in range(world_size)
    ]
    assert all(part.input_ids.shape == (size, 5) for part in parts)
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    assert torch.equal(torch.cat([part.sample_ids for part in parts]), whole.sample_ids)
    assert whole.sample_ids.tolist() == list(range(step * total, (step + 1) * total))
    assert np.array_equal(whole.input_ids.numpy(), loader.rows[loader.row_indices(step)])


@given(num_rows=st.integers(1, 50), batch=st.integers(1, 120), seed=st.integers(0, 2**53), epochs=st.integers(1, 4))
def test_every_row_comes_once_per_epoch_whatever_the_batch(num_rows: int, batch: int, seed: int, epochs: int) -> None:
    loader = TrainLoader(make_rows(num_rows), global_batch_size=batch, seed=seed)
    steps = -(-num_rows * epochs // batch)
    order = np.concatenate([loader.row_indices(step) for step in range(steps)])
    for epoch in range(epochs):
        assert sorted(order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@given(num_rows=st.integers(1, 30), batch=st.integers(1, 20), start=st.integers(0, 30), seed=st.integers(0, 100))
def test_a_run_resumed_at_any_step_sees_the_same_samples(num_rows: int, batch: int, start: int, seed: int) -> None:
    rows = make_rows(num_rows)
    through = TrainLoader(rows, global_batch_size=batch, seed=seed)
    seen = [through.batch(step).input_ids for step in range(start + 5)]
    epoch_order.cache_clear()
    resumed = TrainLoader(rows, global_batch_size=batch, seed=seed)
    for step in range(start, start + 5):
        assert torch.equal(resumed.batch(step).input_ids, seen[step])


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_batch_size_only_cuts_the_stream_of_samples(first: int, second: int) -> None:
    def stream(batch: int) -> list[int]:
        loader = TrainLoader(make_rows(17), global_batch_size=batch, seed=3)
        return [int(row) for step in range(60) for row in loader.row_indices(step)][:60]

    assert stream(first) == stream(second)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_one_of_earlier_versions() -> None:
    # a run that is resumed after an upgrade must not see another order
    assert epoch_order(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert sample_rows(np.arange(10, 20), num_rows=10, seed=7).tolist() == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]


def test_documents_are_given_where_they_are_to_be_masked() -> None:
    rows = np.array([[1, 9, 2, 2, 9], [3, 3, 3, 9, 4]], dtype=np.uint16)
    batch = TrainLoader(rows, global_batch_size=4, seed=0, end_of_text=9).batch(0)
    assert batch.documents is not None
    assert np.array_equal(batch.documents.numpy(), document_ids(batch.input_ids.numpy().astype(np.uint16), 9))
    assert TrainLoader(rows, global_batch_size=4, seed=0).batch(0).documents is None
    (validation,) = validation_batches(rows, batch_size=2, end_of_text=9)
    assert validation.documents is not None and validation.documents.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]


def test_tensors_have_the_types_the_model_expects() -> None:
    batch = TrainLoader(make_rows(6), global_batch_size=4, seed=0, end_of_text=1).batch(0)
    assert batch.documents is not None
    assert batch.input_ids.dtype == batch.documents.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.weights.dtype == torch.float32 and batch.weights.tolist() == [1] * 4


def test_a_batch_that_ranks_cannot_share_is_an_error() -> None:
    loader = TrainLoader(make_rows(6), global_batch_size=6, seed=0)
    with pytest.raises(
        ValueError, match="a global batch of 6 rows cannot be shared evenly by 2 ranks x 2 micro-batches"
    ):
        loader.batch(0, world_size=2, num_micros=2)


@given(num_rows=st.integers(1, 40), batch_size=st.integers(1, 7), world_size=st.integers(1, 5))
def test_the_weighted_validation_mean_is_exact_for_any_number_of_ranks(
    num_rows: int, batch_size: int, world_size: int
) -> None:
    rows = make_rows(num_rows)
    ranks = [
        list(validation_batches(rows, batch_size=batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1  # a rank that stops early would hang the others
    batches = [batch for batches in ranks for batch in batches]
    assert all(batch.input_ids.shape == (batch_size, 5) for batch in batches)
    counted = [
        row
        for batch in batches
        for row, weight in zip(batch.input_ids.tolist(), batch.weights.tolist(), strict=True)
        if weight
    ]
    assert sorted(counted) == rows.tolist()
    total = sum(float((batch.weights * batch.input_ids[:, 0]).sum()) for batch in batches)
    assert total / sum(float(batch.weights.sum()) for batch in batches) == pytest.approx(rows[:, 0].mean())


def test_one_rank_evaluates_the_rows_in_order() -> None:
    batches = list(validation_batches(make_rows(7), batch_size=3))
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert torch.cat([batch.weights for batch in batches]).tolist() == [1] * 7 + [0] * 2


@given(st.integers(1, 50), st.integers(1, 60))
def test_spread_rows_are_distinct_ordered_and_reach_all_over_the_split(num_rows: int, wanted: int) -> None:
    rows = np.arange(num_rows, dtype=np.uint16)[:, None]
    chosen = spread_rows(rows, wanted)[:, 0].tolist()
    assert len(chosen) == len(set(chosen)) == min(num_rows, wanted)
    assert chosen == sorted(chosen) and chosen[0] == 0
    assert max(np.diff([*chosen, num_rows])) <= -(-num_rows // len(chosen))
