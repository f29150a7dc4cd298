"""The bigram loss equals what a person would compute with dictionaries."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mode.data.baseline as baseline
from mode.data import bigram_loss


def slow_bigram_loss(train: list[int], rows: list[list[int]], vocab_size: int) -> float:
    weight = baseline.PRIOR_WEIGHT
    counts, pairs, followed = Counter(train), Counter(zip(train, train[1:], strict=False)), Counter(train[:-1])
    losses = []
    for row in rows:
        for a, b in zip(row, row[1:], strict=False):
            unigram = (counts[b] + 1) / (len(train) + vocab_size)
            losses.append(-math.log((pairs[a, b] + weight * unigram) / (followed[a] + weight)))
    return sum(losses) / len(losses)


@given(
    train=st.lists(st.integers(0, 9), max_size=60),
    rows=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=6),
    chunk=st.integers(1, 70),
)
def test_the_bigram_loss_equals_the_slow_one(train: list[int], rows: list[list[int]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "CHUNK", chunk)
        fast = bigram_loss(np.array(train, dtype=np.uint16), np.array(rows, dtype=np.uint16), 10)
    assert fast == pytest.approx(slow_bigram_loss(train, rows, 10), rel=1e-12)


def test_training_rows_are_read_as_one_stream() -> None:
    tokens = np.random.default_rng(0).integers(0, 7, size=(20, 8)).astype(np.uint16)
    assert bigram_loss(tokens, tokens[:3], 7) == bigram_loss(tokens.reshape(-1), tokens[:3], 7)


def test_the_probabilities_after_any_token_add_up_to_one() -> None:
    train = np.random.default_rng(0).integers(0, 5, size=100).astype(np.uint16)
    for previous in range(6):  # 5 never occurs in training
        pairs = [np.array([[previous, current]], dtype=np.uint16) for current in range(6)]
        assert sum(math.exp(-bigram_loss(train, pair, 6)) for pair in pairs) == pytest.approx(1)


def test_a_predictable_text_has_a_small_loss_and_noise_the_entropy() -> None:
    cycle = np.arange(40_000, dtype=np.uint16) % 4
    assert bigram_loss(cycle, cycle[:64].reshape(4, 16), 4) < 0.02
    noise = np.random.default_rng(0).integers(0, 4, size=40_000).astype(np.uint16)
    assert bigram_loss(noise, noise[:8000].reshape(500, 16), 4) == pytest.approx(math.log(4), abs=0.01)
