"""Which rows a step trains on, and a rank's share of them. Order is a function of (seed, step) alone.

Training reads the infinite sequence "epoch 0 shuffled, epoch 1 shuffled, ..."; global sample n is its
n-th entry, and step s takes samples s*G to s*G + G - 1. A rank and a micro-batch only choose a slice of
them, so every layout trains on the same batches and a run resumes from its step number.

This file knows nothing of files, tokenizers or process groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mode.data.checked import Rows, Tokens
from mode.data.packing import document_ids


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one micro-batch, on the CPU."""

    input_ids: torch.Tensor  # [b, L] int64
    documents: torch.Tensor | None  # [b, L] int64: which document of its row a token is in; None: not masked
    sample_ids: torch.Tensor  # [b] int64: the number of the sample in the whole run, to key random draws
    weights: torch.Tensor  # [b] float32: 1, or 0 for a row that only fills up a validation batch


class TrainLoader:
    """Random access to the batches of a run.

    `end_of_text` is the token that separates documents where they are to be masked from each other, or None.
    """

    def __init__(self, rows: Rows, *, global_batch_size: int, seed: int, end_of_text: int | None = None) -> None:
        self.rows, self.global_batch_size, self.seed, self.end_of_text = rows, global_batch_size, seed, end_of_text

    def row_indices(self, step: int) -> NDArray[np.int64]:
        """The rows of the global batch of a step, in order."""
        samples = step * self.global_batch_size + np.arange(self.global_batch_size, dtype=np.int64)
        return sample_rows(samples, num_rows=len(self.rows), seed=self.seed)

    def batch(self, step: int, *, rank: int = 0, world_size: int = 1, micro: int = 0, num_micros: int = 1) -> Batch:
        """The rows of one rank in one micro-batch: micro-batches follow each other, ranks share each of them."""
        if self.global_batch_size % (world_size * num_micros):
            raise ValueError(
                f"a global batch of {self.global_batch_size} rows cannot be shared evenly by {world_size} ranks x "
                f"{num_micros} micro-batches"
            )
        assert 0 <= rank < world_size and 0 <= micro < num_micros and step >= 0
        size = self.global_batch_size // (world_size * num_micros)
        start = step * self.global_batch_size + (micro * world_size + rank) * size
        samples = np.arange(start, start + size, dtype=np.int64)
        indices = sample_rows(samples, num_rows=len(self.rows), seed=self.seed)
        return _make_batch(self.rows, indices, samples, np.ones(size, dtype=np.float32), self.end_of_text)


def spread_rows(rows: Rows, num_rows: int) -> Tokens:
    """`num_rows` rows at even distances (all, where there are fewer): always the same, from all over a split.

    Neighbouring rows come from the same document, so the first rows alone would say little about the rest.
    """
    num_rows = min(num_rows, len(rows))
    return rows[np.arange(num_rows) * len(rows) // num_rows]


def validation_batches(
    rows: Rows, *, batch_size: int, rank: int = 0, world_size: int = 1, end_of_text: int | None = None
) -> Iterator[Batch]:
    """A rank's share of the rows, in order.

    Every rank gets equally many batches of equal shape, because a forward pass can be a collective. Where the
    rows do not divide, batches are filled up with rows of weight 0: the sum over all ranks of weight times a
    row's loss, divided by the sum of the weights, is the exact mean for any number of ranks.
    """
    num_rows = len(rows)
    for start in range(rank * batch_size, rank * batch_size + num_rows, world_size * batch_size):
        wanted = np.arange(start, start + batch_size, dtype=np.int64)
        weights = (wanted < num_rows).astype(np.float32)
        indices = np.minimum(wanted, num_rows - 1)
        yield _make_batch(rows, indices, indices, weights, end_of_text)


def sample_rows(samples: NDArray[np.int64], *, num_rows: int, seed: int) -> NDArray[np.int64]:
    """The row of each global sample number. Every epoch holds every row once."""
    epochs, places = np.divmod(samples, num_rows)
    indices = np.empty_like(samples)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = epoch_order(num_rows, seed, int(epoch))[places[inside]]
    return indices


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of the rows, by sorting raw random bits.

    numpy promises never to change the raw bits of a seeded bit generator; it makes no such promise for
    `Generator.permutation`, and a resumed run must see the same order after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False  # shared by every caller
    return order


def _make_batch(
    rows: Rows,
    indices: NDArray[np.int64],
    samples: NDArray[np.int64],
    weights: NDArray[np.float32],
    end_of_text: int | None,
) -> Batch:
    tokens = rows[indices]
    return Batch(
        input_ids=torch.from_numpy(tokens.astype(np.int64)),
        documents=None if end_of_text is None else torch.from_numpy(document_ids(tokens, end_of_text)),
        sample_ids=torch.from_numpy(samples.copy()),
        weights=torch.from_numpy(weights),
    )
