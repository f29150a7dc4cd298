"""The loss of a bigram model: what a language model must beat to have learnt more than pair counts.

This file knows arrays of tokens and nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mode.data.checked import Tokens

PRIOR_WEIGHT = 64.0  # how many observations of a token the unigram distribution counts for
CHUNK = 1 << 22  # training tokens looked at together


def bigram_loss(train_tokens: Tokens, validation_rows: Tokens, vocab_size: int) -> float:
    """Nats per token on tokens 1, 2, ... of every validation row, each predicted from the one before it.

    The pair counts are smoothed by the unigram distribution, and that by adding one:

        p(b | a) = (count(a, b) + w * p(b)) / (count(a) + w)      w = PRIOR_WEIGHT
        p(b) = (count(b) + 1) / (tokens + vocab_size)

    where count(a) counts the a's that have a successor. `train_tokens` may have any shape; it is read flat.
    """
    train = train_tokens.reshape(-1)
    previous = validation_rows[:, :-1].reshape(-1).astype(np.int64)
    current = validation_rows[:, 1:].reshape(-1).astype(np.int64)
    # Only pairs that validation asks for are counted, so memory does not grow with the corpus.
    pairs, pair_of_token = np.unique(previous * vocab_size + current, return_inverse=True)
    pair_counts = np.zeros(len(pairs), dtype=np.int64)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(train), CHUNK):
        chunk = train[start : start + CHUNK + 1].astype(np.int64)  # one more: the last token's successor
        counts += np.bincount(chunk[:CHUNK], minlength=vocab_size)
        pair_counts += _count(pairs, chunk[:-1] * vocab_size + chunk[1:])
    followed = counts.copy()
    if len(train):
        followed[train[-1]] -= 1
    unigram = (counts + 1) / (len(train) + vocab_size)
    joint = pair_counts[pair_of_token] + PRIOR_WEIGHT * unigram[current]
    return float(-np.mean(np.log(joint / (followed[previous] + PRIOR_WEIGHT))))


def _count(wanted: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each of the sorted `wanted` values occurs among `codes`."""
    places = np.minimum(np.searchsorted(wanted, codes), len(wanted) - 1)
    return np.bincount(places[wanted[places] == codes], minlength=len(wanted))
