"""Documents become two flat files of tokens, training and validation, in a cache that can be trusted.

A cache folder is named after a hash of everything its tokens depend on, and holds

    train.bin, validation.bin   token ids; every document is followed by the end-of-text token
    tokenizer.json, ...         the tokenizer
    meta.json                   what is in them, and the size every file must have

Rows of a fixed length are a view of a flat file, so the sequence length is no part of the cache.
A folder is built under a lock beside its final place and then renamed, so it is complete or absent.

This file knows nothing of steps, ranks or the order of samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm

from mode.config import DataConfig, ModeConfig
from mode.data.errors import DataError
from mode.data.sources import Source, open_source
from mode.data.tokenizer import (
    NUM_BYTE_TOKENS,
    Tokenizer,
    byte_tokenizer,
    check_vocab_size,
    pretrained_tokenizer,
    tokenizer_identity,
    train_bpe,
)
from mode.host import default_cache_dir

FORMAT = 2  # raise it when the same inputs would give other files
SPLITS = ("train", "validation")
TOKENIZER_CHARACTERS = 1 << 28  # of training text that a BPE is trained on; more would not change it much
BATCH_CHARACTERS = 1 << 20  # encoded at a time: enough to keep every core busy

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]
Item = TypeVar("Item")


@dataclass(frozen=True)
class SplitCounts:
    """What a flat file holds. Tokens include one end-of-text per document, bytes are UTF-8 text alone."""

    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class Split:
    """The rows of one split: a read-only memory map [rows, sequence_length]. The last part row is left out."""

    rows: Tokens
    counts: SplitCounts

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])

    @property
    def bytes_per_token(self) -> float:
        """Bits per byte = nats per token / ln 2 / bytes_per_token."""
        return self.counts.num_bytes / self.counts.num_tokens


@dataclass(frozen=True)
class PackedData:
    """A corpus ready for training."""

    train: Split
    validation: Split
    tokenizer: Tokenizer
    folder: Path  # the cache it lives in
    source: str  # what to call the corpus in a message


def prepare_data(config: ModeConfig, *, quiet: bool = False) -> PackedData:
    """The packed corpus that the configuration describes, built if it is not in the cache yet.

    Any number of processes may call this at once: one builds, the others wait for it.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if data.tokenizer != "pretrained":
        check_vocab_size(NUM_BYTE_TOKENS, vocab_size, f'the smallest "{data.tokenizer}" tokenizer')
    source = open_source(data)
    identity = source.identity()
    key = _cache_key(data, vocab_size, identity)
    cache_dir = _make_cache_dir(data.cache_dir)
    folder = cache_dir / key
    if not _is_complete(folder, key):
        with _locked(cache_dir / f"{key}.lock", quiet):
            if not _is_complete(folder, key):  # else another process has built it in the meantime
                scratch = cache_dir / f"{key}.building"  # ours alone: we hold the lock
                shutil.rmtree(scratch, ignore_errors=True)  # left by a build that was killed
                try:
                    scratch.mkdir()
                    _build(scratch, key, source, data, vocab_size, quiet)
                    if source.identity() != identity:
                        raise DataError(f"{source.name}: changed while it was being read; run again")
                    shutil.rmtree(folder, ignore_errors=True)  # damaged, or we would not be here
                    scratch.rename(folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    return _open(folder, source.name, config)


def document_ids(rows: Tokens, end_of_text: int) -> NDArray[np.int64]:
    """Which document of its row each token belongs to: 0, 1, ...; an end-of-text belongs to what it ends."""
    ends: NDArray[np.int64] = (np.asarray(rows) == end_of_text).astype(np.int64)
    return np.cumsum(ends, axis=-1) - ends


def _cache_key(data: DataConfig, vocab_size: int, source_identity: list[Any]) -> str:
    depends_on = [
        FORMAT,
        source_identity,
        tokenizer_identity(data, vocab_size),
        data.validation_fraction,
        data.max_documents,
    ]
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:24]


def _make_cache_dir(configured: str | None) -> Path:
    cache_dir = Path(configured).expanduser().absolute() if configured is not None else default_cache_dir()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(cache_dir, error) from None
    return cache_dir


@contextlib.contextmanager
def _locked(path: Path, quiet: bool) -> Iterator[None]:
    """Holds a lock that the system gives back if this process dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not quiet:
            print("waiting for another process that is building the data cache", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        raise _unusable(path.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def _unusable(cache_dir: Path, error: OSError) -> DataError:
    return DataError(
        f"{cache_dir}: the cache folder cannot be used: {error.strerror}; name another as mode.data.cache_dir"
    )


# ---------------------------------------------------------------------------------------------------
# Building


def _build(folder: Path, key: str, source: Source, data: DataConfig, vocab_size: int, quiet: bool) -> None:
    def documents() -> Iterator[str]:
        return itertools.islice(source.documents(), data.max_documents)

    reading = _progress(documents(), None, "reading documents", quiet)
    hashes = np.fromiter((content_hash(text) for text in reading), dtype=np.uint64)
    limit = validation_limit(hashes, data.validation_fraction, source.name)

    if data.tokenizer == "bpe":
        training = (text for text in documents() if content_hash(text) > limit)
        sample = _progress(_first_characters(training, TOKENIZER_CHARACTERS), None, "training the tokenizer", quiet)
        tokenizer = train_bpe(sample, vocab_size)
    elif data.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
    else:
        assert data.pretrained is not None
        tokenizer = pretrained_tokenizer(data.pretrained)
        check_vocab_size(tokenizer.vocab_size, vocab_size, f'tokenizer "{data.pretrained}"')
    tokenizer.save(folder)

    packing = _progress(documents(), len(hashes), "packing", quiet)
    counts = _write_tokens(folder, packing, limit, tokenizer)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    meta = {
        "format": FORMAT,
        "key": key,
        "source": source.name,
        "tokenizer": data.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": {split: asdict(counts[split]) for split in SPLITS},
        "sizes": sizes,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut after the rename could leave a complete name on lost data


def content_hash(text: str) -> int:
    """A document's place in [0, 2**64). Equal texts have equal places, so they share a split."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def validation_limit(hashes: NDArray[np.uint64], fraction: float, name: str) -> int:
    """Documents whose hash is at most this are for validation: the given fraction of the distinct texts.

    Cutting at a rank rather than at fraction * 2**64 gives both splits a document even in a small corpus.
    """
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise DataError(
            f"{name}: the corpus holds {len(hashes)} documents, {len(distinct)} of them distinct; training and "
            "validation need one each: divide the text over several files, or over the rows of a jsonl file"
        )
    num_validation = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    return int(distinct[num_validation - 1])


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _write_tokens(folder: Path, documents: Iterable[str], limit: int, tokenizer: Tokenizer) -> dict[str, SplitCounts]:
    dtype = token_dtype(tokenizer.vocab_size)
    num_documents, num_tokens, num_bytes = (dict.fromkeys(SPLITS, 0) for _ in range(3))
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        files = {"train": train, "validation": validation}
        for texts in _batches(documents, BATCH_CHARACTERS):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                split = "validation" if content_hash(text) <= limit else "train"
                ids.append(tokenizer.end_of_text)
                files[split].write(np.array(ids, dtype=dtype).tobytes())
                num_documents[split] += 1
                num_tokens[split] += len(ids)
                num_bytes[split] += len(text.encode("utf-8"))
    return {split: SplitCounts(num_documents[split], num_tokens[split], num_bytes[split]) for split in SPLITS}


def _batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def _progress(items: Iterable[Item], total: int | None, what: str, quiet: bool) -> Iterable[Item]:
    bar: Iterable[Item] = tqdm(items, desc=what, total=total, unit=" documents", disable=quiet, file=sys.stderr)
    return bar


# ---------------------------------------------------------------------------------------------------
# Opening


def _is_complete(folder: Path, key: str) -> bool:
    """Whether the folder holds what its meta.json promises. A truncated or missing file says no."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        sizes = meta["sizes"]
        return meta["key"] == key and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _open(folder: Path, name: str, config: ModeConfig) -> PackedData:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.load(folder)
    check_vocab_size(tokenizer.vocab_size, config.model.vocab_size, f'the "{config.data.tokenizer}" tokenizer')
    splits = []
    for split in SPLITS:
        counts, length = SplitCounts(**meta["splits"][split]), config.model.sequence_length
        if counts.num_tokens < length:
            raise DataError(
                f"{name}: the {split} split holds {counts.num_tokens} tokens in {counts.num_documents} documents, but "
                f"one sequence needs {length} (mode.model.sequence_length); add text, change "
                "mode.data.validation_fraction, or use shorter sequences"
            )
        tokens = np.memmap(folder / f"{split}.bin", dtype=np.dtype(meta["dtype"]), mode="r")
        num_rows = counts.num_tokens // length
        splits.append(Split(tokens[: num_rows * length].reshape(num_rows, length), counts))
    return PackedData(splits[0], splits[1], tokenizer, folder, name)
