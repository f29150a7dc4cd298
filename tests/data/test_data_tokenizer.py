"""Tokenizers spell any text exactly, and travel with a run as two files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from mode.config.settings import DataConfig
from mode.data import DataError, Tokenizer
from mode.data.tokenizer import (
    END_OF_TEXT,
    byte_tokenizer,
    check_vocab_size,
    pretrained_tokenizer,
    tokenizer_identity,
    train_bpe,
)

LINES = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(200)]
BPE = train_bpe(LINES, 400)
BYTES = byte_tokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])


@BOTH
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([END_OF_TEXT, f"a{END_OF_TEXT}b", " "]))
def test_any_text_comes_back_exactly_and_holds_no_end_of_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokens_are_the_bytes(text: str) -> None:
    assert BYTES.encode_batch([text]) == [list(text.encode())]
    assert (BYTES.end_of_text, BYTES.vocab_size) == (256, 257)


def test_a_bpe_has_at_most_the_entries_asked_for_and_fewer_for_a_small_corpus() -> None:
    assert BPE.vocab_size == 400
    assert 257 < train_bpe(["aaaa bbbb"], 1000).vocab_size < 1000


def test_a_bpe_does_not_depend_on_the_order_of_documents() -> None:
    shuffled = random.Random(0).sample(LINES, len(LINES))
    assert train_bpe(shuffled, 400).encode_batch(LINES) == BPE.encode_batch(LINES)


@BOTH
def test_a_saved_tokenizer_loads_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new")
    texts = [*LINES, f"a{END_OF_TEXT}b"]
    for path in (tmp_path / "new", tmp_path / "new" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.encode_batch(texts) == tokenizer.encode_batch(texts)
        assert (loaded.end_of_text, loaded.vocab_size) == (tokenizer.end_of_text, tokenizer.vocab_size)


def test_end_of_text_decodes_to_its_name() -> None:
    assert BPE.decode([BPE.end_of_text]) == END_OF_TEXT


def save_words(folder: Path, *special: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 7}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))


def test_a_pretrained_tokenizer_is_found_by_folder_and_by_file(tmp_path: Path) -> None:
    save_words(tmp_path, "</s>")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = pretrained_tokenizer(str(name))
        assert tokenizer.encode_batch(["a b a b"]) == [[0, 1, 0, 1]]  # neither truncated nor padded
        assert tokenizer.decode([tokenizer.end_of_text]) == "</s>"
        assert tokenizer.vocab_size == max(7, tokenizer.end_of_text) + 1  # ids may have gaps


@pytest.mark.parametrize("value", ["<stop>", {"content": "<stop>"}])
def test_a_tokenizer_config_names_the_end_of_text(tmp_path: Path, value: object) -> None:
    save_words(tmp_path, "</s>", "<stop>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    tokenizer = pretrained_tokenizer(str(tmp_path))
    assert tokenizer.decode([tokenizer.end_of_text]) == "<stop>"


def test_a_pretrained_tokenizer_without_end_of_text_is_an_error(tmp_path: Path) -> None:
    save_words(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer has no end-of-text token"):
        pretrained_tokenizer(str(tmp_path))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        pretrained_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        (tmp_path / "empty").mkdir()
        pretrained_tokenizer(str(tmp_path / "empty"))


def test_a_tokenizer_larger_than_the_model_names_both_numbers() -> None:
    check_vocab_size(400, 400, "the tokenizer")
    with pytest.raises(DataError, match=r"the tokenizer has 401 entries, more than mode\.model\.vocab_size = 400"):
        check_vocab_size(401, 400, "the tokenizer")


def test_the_identity_changes_with_what_the_tokens_depend_on(tmp_path: Path) -> None:
    bpe, plain = DataConfig(), DataConfig(tokenizer="bytes")
    assert tokenizer_identity(bpe, 300) != tokenizer_identity(bpe, 301)
    assert tokenizer_identity(plain, 300) == tokenizer_identity(plain, 301) != tokenizer_identity(bpe, 300)
    save_words(tmp_path, "</s>")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        save_words(tmp_path, "</s>")
        (tmp_path / "tokenizer_config.json").write_text("{}")
        config = DataConfig(tokenizer="pretrained", pretrained=str(name))
        first = tokenizer_identity(config, 300)
        save_words(tmp_path, "</s>", "<stop>")
        second = tokenizer_identity(config, 300)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
        third = tokenizer_identity(config, 300)
        assert first != second != third != first
