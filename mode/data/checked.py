"""Rows of tokens read from a file whose blocks have checksums; a block is checked when it is first read.

So a large cache need not be read whole before training starts, and no damaged token is ever returned.

This file knows nothing of tokenizers, splits or samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mode.data.errors import DamagedCache

META = "meta.json"  # a cache folder without this file is built again
BLOCK = 1 << 16  # bytes
SPOT_CHECKS = 1 << 10  # blocks looked at when a file is opened, at even distances: all, of a file below 128 MB

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]
Checksums: TypeAlias = NDArray[np.uint32]


def block_checksums(path: Path) -> Checksums:
    """The CRC-32 of every block of a file."""
    with path.open("rb") as file:
        return np.array([zlib.crc32(block) for block in iter(partial(file.read, BLOCK), b"")], dtype="<u4")


class CheckedRows:
    """The rows [number of rows, `length`] of a flat file of tokens. The last part row is left out."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int, checksums: Checksums) -> None:
        tokens: Tokens = np.memmap(path, dtype=dtype, mode="r")
        num_rows = len(tokens) // length
        self.path, self.shape = path, (num_rows, length)
        self._rows = tokens[: num_rows * length].reshape(num_rows, length)
        self._bytes = tokens.view(np.uint8).data
        self._row_bytes = length * dtype.itemsize
        self._checksums, self._unchecked = checksums, np.ones(len(checksums), dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | NDArray[np.int64]) -> Tokens:
        """The rows of a slice, as a view, or of an array of row numbers, as a copy.

        Damage is an error that no retry mends, so the cache is also marked for the next start to build it again.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            blocks = np.arange(start * self._row_bytes // BLOCK, -(-stop * self._row_bytes // BLOCK))
        else:
            assert (index >= 0).all()
            first, last = index * self._row_bytes // BLOCK, ((index + 1) * self._row_bytes - 1) // BLOCK
            most = self._row_bytes // BLOCK + 2  # blocks that a row can lie in
            blocks = np.minimum(first[:, None] + np.arange(most), last[:, None])
        try:
            self._check(np.unique(blocks[self._unchecked[blocks]]).tolist())
        except DamagedCache as damage:
            raise self._give_up(damage) from None
        return self._rows[index]

    def spot_check(self) -> None:
        """Raises `DamagedCache` if one of some blocks, all of a small file, is not as it was written."""
        self._check(range(0, len(self._checksums), max(1, len(self._checksums) // SPOT_CHECKS)))

    def _check(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK]) != self._checksums[block]:
                raise DamagedCache(f"{self.path}: the block at byte {block * BLOCK} is not as it was written")
            self._unchecked[block] = False

    def _give_up(self, damage: DamagedCache) -> DamagedCache:
        try:
            self.path.with_name(META).unlink(missing_ok=True)
        except OSError as error:
            return DamagedCache(
                f"{damage}, and the data cache cannot be marked as damaged: {error.strerror}; remove "
                f"{self.path.parent} and start again, which builds it again from its source"
            )
        return DamagedCache(f"{damage}; start again: the data cache is then built again from its source")


Rows: TypeAlias = Tokens | CheckedRows  # what is read row by row: from memory or from a file
