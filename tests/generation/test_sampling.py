"""From logits to tokens: each restriction does what it says, and draws follow the probabilities."""

from __future__ import annotations

import torch

from mode.depth.noise import keyed_uniform
from mode.transformer.generation.sampling import Sampling, draw, penalised, restrict, sample

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
HALF = torch.tensor([0.5], dtype=torch.float64)


def allowed(top_k: int | None = None, top_p: float | None = None) -> list[int]:
    return restrict(LOGITS, top_k, top_p)[0].isfinite().nonzero().squeeze(1).tolist()


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_lowest():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -5.0, -2.0]])
    assert sample(logits, Sampling(), torch.zeros(2, dtype=torch.float64)).tolist() == [1, 0]


def test_top_k_leaves_the_k_likeliest():
    assert allowed(top_k=1) == [0] and allowed(top_k=3) == [0, 1, 2] and allowed(top_k=99) == [0, 1, 2, 3]
    equal = restrict(torch.zeros(1, 5, dtype=torch.float64), 2, None)[0]
    assert equal.isfinite().tolist() == [True, True, False, False, False]


def test_top_p_leaves_the_fewest_that_reach_the_probability():
    assert allowed(top_p=0.4) == [0] and allowed(top_p=0.6) == [0, 1] and allowed(top_p=0.9) == [0, 1, 2]
    assert allowed(top_p=1.0) == [0, 1, 2, 3] and allowed(top_p=1e-9) == [0]


def test_top_p_counts_what_top_k_has_left():
    assert allowed(top_k=2, top_p=0.62) == [0], "of 0.5 + 0.3 the first has 0.625"
    assert allowed(top_p=0.62) == [0, 1]


def test_the_repetition_penalty_lowers_what_was_seen_and_nothing_else():
    assert penalised(torch.tensor([[2.0, -2.0, 0.0]]), 2.0).tolist() == [[1.0, -4.0, 0.0]]
    logits, seen = torch.tensor([[3.0, 2.0, -1.0]]), torch.tensor([[True, False, False]])
    assert sample(logits, Sampling(repetition_penalty=2.0), HALF, seen).tolist() == [1]
    assert sample(logits, Sampling(repetition_penalty=1.2), HALF, seen).tolist() == [0]


def test_draws_follow_the_probabilities():
    uniform = keyed_uniform(torch.arange(40_000), number=3)
    assert ((uniform >= 0) & (uniform < 1)).all()
    ids = sample(LOGITS.expand(40_000, -1), Sampling(temperature=1.0), uniform)
    shares = torch.bincount(ids, minlength=4) / 40_000
    torch.testing.assert_close(shares.double(), LOGITS.exp()[0], atol=0.01, rtol=0)
    sharper = sample(LOGITS.expand(40_000, -1), Sampling(temperature=0.5), uniform)
    expected = (2 * LOGITS).softmax(dim=-1)[0]
    torch.testing.assert_close((torch.bincount(sharper, minlength=4) / 40_000).double(), expected, atol=0.01, rtol=0)


def test_the_largest_random_number_never_picks_a_token_of_probability_zero():
    scores = torch.tensor([[0.3, 0.7, 0.0, 0.0]], dtype=torch.float64)
    almost_one = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert draw(scores, almost_one).tolist() == [1]
    assert draw(scores, torch.ones(1, dtype=torch.float64)).tolist() == [1]
    assert draw(torch.tensor([[0.0, 1.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4]])
    assert sample(logits, Sampling(temperature=1e-300), HALF).tolist() == [0]


def test_random_numbers_of_different_rows_and_steps_are_unrelated():
    first, second = keyed_uniform(torch.arange(1000), 0), keyed_uniform(torch.arange(1000), 1)
    assert not torch.equal(first[1:], second[:-1])
    assert torch.corrcoef(torch.stack([first, second]))[0, 1].abs() < 0.1
    assert torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1].abs() < 0.1
