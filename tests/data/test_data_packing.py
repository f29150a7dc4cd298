"""The cache holds every document once, in one split, and is complete or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

import mode
import mode.data.checked as checked
import mode.data.packing as packing
from mode.config.settings import ModeConfig
from mode.data import DamagedCache, DataError, PackedData, Tokenizer, document_ids, prepare_data
from mode.data.packing import SPLITS, token_dtype, validation_limit
from mode.data.tokenizer import train_bpe
from mode.host import default_cache_dir

Configure = Callable[..., ModeConfig]


def texts_of(data: PackedData, split: str) -> list[str]:
    """The documents of a split, read back from its flat file."""
    tokens = np.fromfile(data.folder / f"{split}.bin", dtype=token_dtype(data.tokenizer.vocab_size))
    ends = np.flatnonzero(tokens == data.tokenizer.end_of_text)
    assert ends[-1] == len(tokens) - 1
    return [data.tokenizer.decode(part[:-1]) for part in np.split(tokens, ends[:-1] + 1)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    builds: list[Path] = []
    original = packing._build

    def build(folder: Path, *rest: object) -> None:
        builds.append(folder)
        original(folder, *rest)

    monkeypatch.setattr(packing, "_build", build)
    return builds


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_packing_gives_every_document_back_once_and_in_order(
    configure: Configure, corpus: list[str], tmp_path: Path, tokenizer: str
) -> None:
    data = prepare_data(configure(tmp_path / "texts/*.txt", tokenizer=tokenizer), quiet=True)
    train, validation = (texts_of(data, split) for split in SPLITS)
    assert sorted(train + validation) == sorted(corpus)
    assert train == [text for text in corpus if text in train]
    assert len(validation) == 10  # a quarter of forty


def test_rows_are_consecutive_pieces_of_the_flat_file(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    short = prepare_data(configure(tmp_path / "texts/*.txt", sequence_length=16), quiet=True)
    long = prepare_data(configure(tmp_path / "texts/*.txt", sequence_length=33), quiet=True)
    assert short.folder == long.folder  # the sequence length is a view, not another cache
    flat = np.fromfile(short.folder / "train.bin", dtype=np.uint16)
    for data, length in ((short, 16), (long, 33)):
        rows = data.train.rows
        assert rows.shape == (len(flat) // length, length)
        assert np.array_equal(rows[:].reshape(-1), flat[: len(rows) * length])
        assert np.array_equal(rows[np.array([2, 0])], flat[: 3 * length].reshape(3, length)[[2, 0]])
        assert isinstance(rows[:], np.memmap) and not rows[:].flags.writeable


def test_counts_are_those_of_the_text(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    data = prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    for name, split in (("train", data.train), ("validation", data.validation)):
        texts = texts_of(data, name)
        tokens = sum(len(ids) + 1 for ids in data.tokenizer.encode_batch(texts))
        size = sum(len(text.encode()) for text in texts)
        assert (split.counts.num_documents, split.counts.num_tokens, split.counts.num_bytes) == (
            len(texts),
            tokens,
            size,
        )
        assert split.bytes_per_token == size / tokens


def test_the_tokenizer_is_trained_on_training_documents_alone(
    configure: Configure, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        seen.extend(texts)
        return train_bpe(seen, vocab_size)

    monkeypatch.setattr(packing, "train_bpe", train)
    data = prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    assert seen == texts_of(data, "train")


def test_equal_texts_never_land_in_both_splits(configure: Configure, tmp_path: Path) -> None:
    rows = [f"text number {number % 20} is here three times" for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = prepare_data(configure(tmp_path / "a.jsonl", validation_fraction=0.3), quiet=True)
    train, validation = (texts_of(data, split) for split in SPLITS)
    assert not set(train) & set(validation)
    assert len(train) == 42 and len(validation) == 18  # nothing is lost: 30 % of the distinct texts, three of each


@pytest.mark.parametrize(("fraction", "expected"), [(0.001, 1), (0.3, 3), (0.999, 9)])
def test_both_splits_have_a_document_whatever_the_fraction(fraction: float, expected: int) -> None:
    hashes = np.arange(10, 0, -1, dtype=np.uint64)
    assert (hashes <= validation_limit(hashes, fraction, "corpus")).sum() == expected


def test_document_ids_count_the_ends_before_a_token() -> None:
    rows = np.array([[5, 9, 5, 5, 9, 9, 1], [9, 1, 1, 1, 1, 1, 9]], dtype=np.uint16)
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert document_ids(rows, end_of_text=9).tolist() == expected


def test_max_documents_takes_the_first_ones(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    data = prepare_data(configure(tmp_path / "texts/*.txt", max_documents=8), quiet=True)
    assert sorted(texts_of(data, "train") + texts_of(data, "validation")) == sorted(corpus[:8])


def test_the_standard_library_can_be_packed(configure: Configure) -> None:
    config = configure(vocab_size=600, sequence_length=64, max_documents=12)
    data = prepare_data(config, quiet=True)
    assert data.train.counts.num_documents == 9 and data.validation.counts.num_documents == 3
    assert data.train.num_rows > 10
    assert data.tokenizer.vocab_size == 600


def test_a_pretrained_tokenizer_is_used_and_checked(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    first = prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    pretrained = {"tokenizer": "pretrained", "pretrained": str(first.folder)}
    second = prepare_data(configure(tmp_path / "texts/*.txt", **pretrained), quiet=True)
    assert second.folder != first.folder
    assert np.array_equal(first.train.rows[:], second.train.rows[:])
    with pytest.raises(DataError, match=r"has 300 entries, more than mode\.model\.vocab_size = 299"):
        prepare_data(configure(tmp_path / "texts/*.txt", vocab_size=299, **pretrained), quiet=True)


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_a_vocabulary_too_small_for_bytes_is_an_error(
    configure: Configure, corpus: list[str], tmp_path: Path, tokenizer: str
) -> None:
    expected = rf'the smallest "{tokenizer}" tokenizer has 257 entries, more than mode\.model\.vocab_size = 256'
    with pytest.raises(DataError, match=expected):
        prepare_data(configure(tmp_path / "texts/*.txt", tokenizer=tokenizer, vocab_size=256), quiet=True)


@pytest.mark.parametrize(("fraction", "split"), [(0.9, "train"), (0.1, "validation")])
def test_a_corpus_shorter_than_a_sequence_says_what_there_is_and_what_is_needed(
    configure: Configure, tmp_path: Path, fraction: float, split: str
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(10)))
    config = configure(tmp_path / "a.jsonl", tokenizer="bytes", validation_fraction=fraction)
    with pytest.raises(DataError) as raised:
        prepare_data(config, quiet=True)
    assert f"{tmp_path}/a.jsonl: the {split} split holds 7 tokens in 1 documents, but one sequence needs 16" in str(
        raised.value
    )


def test_a_corpus_of_one_document_cannot_be_split(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("all there is")
    with pytest.raises(DataError, match=r"a\.txt: the corpus holds 1 documents, 1 of them distinct; training and"):
        prepare_data(configure(tmp_path / "a.txt"), quiet=True)


# ---------------------------------------------------------------------------------------------------
# The cache


def test_a_second_call_reads_the_cache(
    configure: Configure, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = count_builds(monkeypatch)
    config = configure(tmp_path / "texts/*.txt")
    first, second = prepare_data(config, quiet=True), prepare_data(config, quiet=True)
    assert len(builds) == 1
    assert np.array_equal(first.train.rows[:], second.train.rows[:])
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [
        first.folder.name,
        first.folder.name + ".lock",
    ]


def test_everything_the_tokens_depend_on_gives_another_cache(
    configure: Configure, corpus: list[str], tmp_path: Path
) -> None:
    pattern = tmp_path / "texts/*.txt"
    folders = [
        prepare_data(configure(pattern, **changes), quiet=True).folder
        for changes in (
            {},
            {"vocab_size": 301},
            {"tokenizer": "bytes"},
            {"validation_fraction": 0.3},
            {"max_documents": 30},
        )
    ]
    (tmp_path / "texts/000.txt").write_text("another text")
    folders.append(prepare_data(configure(pattern), quiet=True).folder)
    (tmp_path / "texts/more.txt").write_text("one more text")
    folders.append(prepare_data(configure(pattern), quiet=True).folder)
    assert len(set(folders)) == len(folders)


def test_building_twice_gives_the_same_bytes(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    first = prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    other = prepare_data(configure(tmp_path / "texts/*.txt", cache_dir=str(tmp_path / "other")), quiet=True)
    assert first.folder.name == other.folder.name
    assert bytes_of(first.folder) == bytes_of(other.folder)


def change_meta(content: bytes) -> bytes:
    meta = json.loads(content)
    meta["splits"]["train"]["num_bytes"] += 1
    return json.dumps(meta, indent=2).encode()


def without_checksums(content: bytes) -> bytes:
    meta = json.loads(content)
    del meta["checksum"], meta["checksums"]
    return json.dumps(meta, indent=2).encode()


def change_tokens(content: bytes) -> bytes:
    tokens = np.frombuffer(content, dtype=np.uint16).copy()
    tokens[::20] ^= 1  # 5 % of them, to ids that are legal
    return tokens.tobytes()


DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    *((name, lambda content: content[:-2], "") for name in ("train.bin", "validation.bin", "tokenizer.json")),
    *((name, lambda content: content[:-2], "") for name in ("tokenizer_config.json", "train.crc32", "meta.json")),
    ("train.bin", lambda content: bytes(len(content)), "the block at byte 0 is not as it was written"),
    ("train.bin", change_tokens, "is not as it was written"),
    ("validation.bin", lambda content: b"\xff" * len(content), "is not as it was written"),  # no token has this id
    ("train.crc32", lambda content: bytes(len(content)), "is not as it was written"),
    ("tokenizer.json", lambda content: content.replace(b'"e"', b'"E"'), "is not as it was written"),
    ("tokenizer_config.json", lambda content: content[:-3] + b"}}}", "is not as it was written"),
    ("meta.json", lambda content: b"\xff\xfe" + content, "is not JSON"),
    ("meta.json", lambda content: b"[1]", "is not as it was written"),
    ("meta.json", lambda content: b"[" * 100_000, "is not JSON"),
    ("meta.json", change_meta, "is not as it was written"),
    ("meta.json", without_checksums, "has no checksums, as caches of earlier versions"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES, ids=[f"{n}{i}" for i, (n, _, _) in enumerate(DAMAGES)])
def test_a_damaged_cache_is_built_again_and_one_line_says_so(
    configure: Configure,
    corpus: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[bytes], bytes],
    words: str,
) -> None:
    config = configure(tmp_path / "texts/*.txt", tokenizer="bytes")
    folder = prepare_data(config, quiet=True).folder
    before = bytes_of(folder)
    (folder / name).write_bytes(damage(before[name]))
    assert bytes_of(folder) != before
    assert prepare_data(config, quiet=True).folder == folder
    assert bytes_of(folder) == before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{folder / name}: ") and words in line
    assert line.endswith(f"; building the data cache again from {tmp_path}/texts/000.txt and 39 more files")


@pytest.mark.parametrize("name", ["train.bin", "validation.crc32", "tokenizer.json", "meta.json"])
def test_a_cache_that_lacks_a_file_is_built_again(
    configure: Configure, corpus: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    config = configure(tmp_path / "texts/*.txt")
    folder = prepare_data(config, quiet=True).folder
    before = bytes_of(folder)
    (folder / name).unlink()
    prepare_data(config, quiet=True)
    assert bytes_of(folder) == before
    assert f"{folder / name}: is missing; building the data cache again from" in capfd.readouterr().err


def test_a_damaged_block_of_a_large_cache_is_an_error_when_it_is_read_and_mended_by_starting_again(
    configure: Configure, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "BLOCK", 64)
    monkeypatch.setattr(checked, "SPOT_CHECKS", 1)  # so that only the first block is looked at when a file is opened
    config = configure(tmp_path / "texts/*.txt", sequence_length=48)  # 96 bytes: rows begin within blocks
    whole = prepare_data(config, quiet=True)
    expected = np.array(whole.train.rows[:])
    damaged = 10 * 64 + 5  # the byte: in block 10, so in rows 6 and 7 of bytes 576 to 671 and 672 to 767
    content = bytearray((whole.folder / "train.bin").read_bytes())
    content[damaged] ^= 1
    (whole.folder / "train.bin").write_bytes(content)

    rows = prepare_data(config, quiet=True).train.rows
    assert np.array_equal(rows[np.array([5, 8, 0])], expected[[5, 8, 0]])
    assert np.array_equal(rows[:6], expected[:6])
    for index in (np.array([0, 7]), np.array([6]), slice(None)):
        with pytest.raises(DamagedCache, match=r"train\.bin: the block at byte 640 .* start again: .* built again"):
            rows[index]
    assert np.array_equal(prepare_data(config, quiet=True).train.rows[:], expected)


def test_the_digest_is_that_of_the_tokens_and_the_tokenizer(
    configure: Configure, corpus: list[str], tmp_path: Path
) -> None:
    first = prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    (tmp_path / "texts").rename(tmp_path / "moved")
    moved = prepare_data(configure(tmp_path / "moved/*.txt"), quiet=True)
    assert moved.folder != first.folder and moved.digest == first.digest
    (tmp_path / "moved/000.txt").write_text(corpus[0] + "!")
    assert prepare_data(configure(tmp_path / "moved/*.txt"), quiet=True).digest != first.digest


def test_a_failed_build_leaves_nothing_behind(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts/999.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"999\.txt: the byte at offset 0"):
        prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_files_that_change_while_they_are_read_are_an_error(
    configure: Configure, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        (tmp_path / "texts/000.txt").write_text("changed meanwhile")
        return train_bpe(texts, vocab_size)

    monkeypatch.setattr(packing, "train_bpe", train)
    with pytest.raises(DataError, match=r"000\.txt and 39 more files: changed while it was being read"):
        prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)


def test_a_cache_folder_that_cannot_be_made_is_named(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"cache: the cache folder cannot be used: .*mode\.data\.cache_dir"):
        prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)


def test_the_default_cache_follows_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "mode"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home/.cache/mode"


def test_progress_goes_to_standard_error_unless_quiet(
    configure: Configure, corpus: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare_data(configure(tmp_path / "texts/*.txt"), quiet=True)
    assert capfd.readouterr() == ("", "")
    prepare_data(configure(tmp_path / "texts/*.txt", max_documents=30))
    out, err = capfd.readouterr()
    assert out == ""
    assert all(stage in err for stage in ("reading documents", "training the tokenizer", "packing: 100%"))


# ---------------------------------------------------------------------------------------------------
# Processes

# Builds the cache of the configuration in argv[1]; what stands at BEFORE may interfere with the build.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
import mode.data.packing as packing
from mode.config.settings import ModeConfig
config = ModeConfig.from_dict(json.loads(Path(sys.argv[1]).read_text()))
here = Path(sys.argv[1]).parent
BEFORE
data = packing.prepare_data(config)
print(data.train.num_rows, data.folder.name)
"""

REPORT_AND_LINGER = """
original = packing.train_bpe
def train(texts, vocab_size):
    with (here / "builds").open("a") as log: log.write("built\\n")
    while not (here / "go").exists(): time.sleep(0.01)
    return original(texts, vocab_size)
packing.train_bpe = train
"""

DIE_HALF_WAY = """
original = packing.Tokenizer.encode_batch
calls = []
def encode_batch(self, texts):
    calls.append(texts)
    if len(calls) == 3: os._exit(9)
    return original(self, texts)
packing.Tokenizer.encode_batch = encode_batch
packing.BATCH_CHARACTERS = 100
"""


def start(config: ModeConfig, folder: Path, before: str, name: str = "only") -> subprocess.Popen[str]:
    """A process that builds the cache. What it says goes to `folder/name.err`."""
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    environment = {**os.environ, "PYTHONPATH": str(Path(mode.__file__).parents[1])}
    with (folder / f"{name}.err").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("BEFORE", before), str(folder / "config.json")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def test_two_processes_at_once_build_one_good_cache_once(
    configure: Configure, corpus: list[str], tmp_path: Path
) -> None:
    config = configure(tmp_path / "texts/*.txt")
    names = ("first", "second")
    processes = [start(config, tmp_path, REPORT_AND_LINGER, name) for name in names]
    # Whoever builds goes on once the other has said that it waits, or builds too, which is the failure.
    while all(process.poll() is None for process in processes):
        waits = any("waiting for another process" in (tmp_path / f"{name}.err").read_text() for name in names)
        if waits or (tmp_path / "builds").exists() and (tmp_path / "builds").read_text().count("built") == 2:
            break
        time.sleep(0.02)
    (tmp_path / "go").touch()
    outputs = [process.communicate()[0] for process in processes]
    errors = [(tmp_path / f"{name}.err").read_text() for name in names]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sum("waiting for another process" in error for error in errors) == 1
    assert outputs[0] == outputs[1] != ""
    assert (tmp_path / "builds").read_text() == "built\n"

    alone = prepare_data(configure(tmp_path / "texts/*.txt", cache_dir=str(tmp_path / "alone")), quiet=True)
    assert bytes_of(tmp_path / "cache" / alone.folder.name) == bytes_of(alone.folder)


def test_a_build_that_is_killed_half_way_is_done_again(configure: Configure, corpus: list[str], tmp_path: Path) -> None:
    config = configure(tmp_path / "texts/*.txt")
    process = start(config, tmp_path, DIE_HALF_WAY)
    process.communicate()
    assert process.returncode == 9
    (left,) = (tmp_path / "cache").glob("*.building")  # it died in the middle of its work
    assert (left / "train.bin").exists() and not (left / "meta.json").exists()

    data = prepare_data(config, quiet=True)
    assert not left.exists()
    assert sorted(texts_of(data, "train") + texts_of(data, "validation")) == sorted(corpus)
