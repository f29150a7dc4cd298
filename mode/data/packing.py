"""Documents become two flat files of tokens, training and validation, in a cache that can be trusted.

A cache folder is named after a hash of everything its tokens depend on, and holds

    train.bin, validation.bin   token ids; every document is followed by the end-of-text token
    train.crc32, ...            a checksum of every block of these files, compared when the block is read
    tokenizer.json, ...         the tokenizer
    meta.json                   what is in them; size and checksum of every file, and a checksum of its own

Rows of a fixed length are a view of a flat file, so the sequence length is no part of the cache.
A folder is built under a lock beside its final place and then renamed, so it is complete or absent. One that is
damaged, or was written without checksums, is built again.

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
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm import tqdm

from mode.config.settings import DataConfig, FilesConfig, ModeConfig
from mode.data.checked import META, CheckedRows, Rows, Tokens, block_checksums
from mode.data.errors import DamagedCache, DataError
from mode.data.sources import LocalFiles, Source, find_files, open_source
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

Item = TypeVar("Item")


@dataclass(frozen=True)
class SplitCounts:
    """What a flat file holds. Tokens include one end-of-text per document, bytes are UTF-8 text alone."""

    num_documents: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class Split:
    """The rows of one split: [rows, sequence_length]. The last part row is left out."""

    rows: Rows
    counts: SplitCounts

    @property
    def num_rows(self) -> int:
        return len(self.rows)

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
    digest: str  # equal for equal tokens and tokenizers, wherever they were packed


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
    with contextlib.suppress(DamagedCache):
        return _open(folder, key, source.name, config)
    with _locked(cache_dir / f"{key}.lock", quiet):
        try:
            return _open(folder, key, source.name, config)  # another process has built it in the meantime
        except DamagedCache as damage:
            if folder.exists():  # said by the process that builds, so once
                print(f"{damage}; building the data cache again from {source.name}", file=sys.stderr)
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
        return _open(folder, key, source.name, config)


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
    for split in SPLITS:
        (folder / f"{split}.crc32").write_bytes(block_checksums(folder / f"{split}.bin").tobytes())
    paths = sorted(folder.iterdir())
    meta: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "source": source.name,
        "tokenizer": data.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": {split: asdict(counts[split]) for split in SPLITS},
        "sizes": {path.name: path.stat().st_size for path in paths},
        "checksums": {path.name: _file_checksum(path) for path in paths if path.suffix != ".bin"},
    }
    meta["checksum"] = _json_checksum(meta)
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
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


def pack_files(files: FilesConfig, tokenizer: Tokenizer, sequence_length: int) -> Split:
    """All text of some files as rows in memory: for a trained model, which has its tokenizer already."""
    source = LocalFiles(find_files(files), files.text_column)
    parts, num_bytes = [], 0
    for text, ids in _encode(source.documents(), tokenizer):
        parts.append(ids)
        num_bytes += len(text.encode("utf-8"))
    num_tokens = sum(map(len, parts))
    num_rows = num_tokens // sequence_length
    if num_rows == 0:
        raise DataError(
            f"{source.name}: holds {num_tokens} tokens, but one sequence of the model needs {sequence_length}; add text"
        )
    rows = np.concatenate(parts)[: num_rows * sequence_length].reshape(num_rows, sequence_length)
    return Split(rows, SplitCounts(len(parts), num_tokens, num_bytes))


def _write_tokens(folder: Path, documents: Iterable[str], limit: int, tokenizer: Tokenizer) -> dict[str, SplitCounts]:
    num_documents, num_tokens, num_bytes = (dict.fromkeys(SPLITS, 0) for _ in range(3))
    with (folder / "train.bin").open("wb") as train, (folder / "validation.bin").open("wb") as validation:
        files = {"train": train, "validation": validation}
        for text, ids in _encode(documents, tokenizer):
            split = "validation" if content_hash(text) <= limit else "train"
            files[split].write(ids.tobytes())
            num_documents[split] += 1
            num_tokens[split] += len(ids)
            num_bytes[split] += len(text.encode("utf-8"))
    return {split: SplitCounts(num_documents[split], num_tokens[split], num_bytes[split]) for split in SPLITS}


def _encode(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens]]:
    """Every document and its tokens, the end-of-text token included."""
    dtype = token_dtype(tokenizer.vocab_size)
    for texts in _batches(documents, BATCH_CHARACTERS):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            yield text, np.array([*ids, tokenizer.end_of_text], dtype=dtype)


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


def _file_checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _json_checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_meta(folder: Path, key: str) -> dict[str, Any]:
    """The description of a folder, once its files are found to be those it describes, the tokens excepted."""
    path = folder / META
    try:
        meta = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCache(f"{path}: is missing") from None
    except (ValueError, RecursionError):
        raise DamagedCache(f"{path}: is not JSON") from None
    if isinstance(meta, dict) and meta.get("key") == key and "checksum" not in meta:
        raise DamagedCache(f"{path}: has no checksums, as caches of earlier versions")
    if not isinstance(meta, dict) or meta.pop("checksum", None) != _json_checksum(meta) or meta["key"] != key:
        raise DamagedCache(f"{path}: is not as it was written")
    for name, size in meta["sizes"].items():
        path = folder / name
        if not path.is_file():
            raise DamagedCache(f"{path}: is missing")
        if path.stat().st_size != size:
            raise DamagedCache(f"{path}: has {path.stat().st_size} bytes instead of {size}")
        if name in meta["checksums"] and _file_checksum(path) != meta["checksums"][name]:
            raise DamagedCache(f"{path}: is not as it was written")
    return meta


def _open(folder: Path, key: str, name: str, config: ModeConfig) -> PackedData:
    """The data of a cache folder. Raises `DamagedCache` where it is not what was built there."""
    meta = _read_meta(folder, key)
    length = config.model.sequence_length
    rows = {}
    for split in SPLITS:
        checksums = np.fromfile(folder / f"{split}.crc32", dtype="<u4")
        rows[split] = CheckedRows(folder / f"{split}.bin", np.dtype(meta["dtype"]), length, checksums)
        rows[split].spot_check()
    tokenizer = Tokenizer.load(folder)
    check_vocab_size(tokenizer.vocab_size, config.model.vocab_size, f'the "{config.data.tokenizer}" tokenizer')
    splits = {split: Split(rows[split], SplitCounts(**meta["splits"][split])) for split in SPLITS}
    for split, opened in splits.items():
        if opened.num_rows == 0:
            raise DataError(
                f"{name}: the {split} split holds {opened.counts.num_tokens} tokens in {opened.counts.num_documents} "
                f"documents, but one sequence needs {length} (mode.model.sequence_length); add text, change "
                "mode.data.validation_fraction, or use shorter sequences"
            )
    digest = _json_checksum([meta["dtype"], meta["splits"], meta["sizes"], meta["checksums"]])
    return PackedData(splits["train"], splits["validation"], tokenizer, folder, name, digest)
