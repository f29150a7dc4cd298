"""Text to token ids and back: a byte-level BPE trained here, plain bytes, or a pretrained tokenizer.

All three are one class around the `tokenizers` library, so each saves to and loads from the same two
files, `tokenizer.json` and `tokenizer_config.json`, which other libraries read too.

This file knows nothing of sources, splits or caches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mode.config.settings import DataConfig
from mode.data.errors import DataError
from mode.data.hub import go_offline_if_unreachable

END_OF_TEXT = "<|endoftext|>"
NUM_BYTE_TOKENS = 257  # every byte, and end-of-text: the smallest vocabulary that can spell any text

# What pretrained tokenizers call their end of text, where no tokenizer_config.json says it.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer:
    """Encodes text exactly: a document that spells out the end-of-text token gets its bytes, not the token."""

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text_token: str) -> None:
        end_of_text = backend.token_to_id(end_of_text_token)
        assert end_of_text is not None
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # true means: as text, where a document happens to hold their names
        self._backend = backend
        self._end_of_text_token = end_of_text_token
        self.end_of_text: int = end_of_text
        self.vocab_size: int = 1 + max(backend.get_vocab().values())  # ids may have gaps, so not their number

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without an end-of-text token."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=False)

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both give every text the same ids, by their files."""
        return self.end_of_text == other.end_of_text and self._backend.to_str() == other._backend.to_str()

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self._end_of_text_token}) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """A tokenizer from a folder that holds `tokenizer.json`, or from such a file."""
        path = Path(folder)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():  # a device would be read for ever
            raise DataError(
                f"{path}: cannot be read as a tokenizer: there is no such file, or it is not an ordinary one"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise DataError(f"{path}: cannot be read as a tokenizer: {error}") from None
        named = _named_end(path.with_name("tokenizer_config.json"))
        for token in (named, *KNOWN_ENDS):
            if token is not None and backend.token_to_id(token) is not None:
                return cls(backend, token)
        raise DataError(
            f"{path}: the tokenizer has no end-of-text token; name one as eos_token in a tokenizer_config.json "
            f"beside it, or use a tokenizer with one of {', '.join(KNOWN_ENDS)}"
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries; a small corpus gives fewer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so that no text is unknown
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, END_OF_TEXT)


def byte_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, whose id is the byte; end-of-text is 256. It is a BPE without merges."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend, END_OF_TEXT)


def pretrained_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by path (a folder or a file) or, where there is no such path, by hub name."""
    path = Path(name).expanduser()
    if path.exists():
        return Tokenizer.load(path)
    from huggingface_hub import hf_hub_download

    go_offline_if_unreachable()
    try:
        file = hf_hub_download(name, "tokenizer.json")
    except Exception as error:  # its own errors, the HTTP client's, and ValueError for what cannot be a hub name
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f'tokenizer "{name}": there is no such file or folder, and the Hugging Face hub cannot provide it: {reason}'
        ) from None
    with contextlib.suppress(Exception):  # many repositories have none
        hf_hub_download(name, "tokenizer_config.json")  # lands beside the other file, where `load` looks for it
    return Tokenizer.load(file)


def check_vocab_size(num_entries: int, vocab_size: int, what: str) -> None:
    if num_entries > vocab_size:
        raise DataError(
            f"{what} has {num_entries} entries, more than mode.model.vocab_size = {vocab_size}; "
            f"set mode.model.vocab_size to {num_entries} or more"
        )


def tokenizer_identity(config: DataConfig, vocab_size: int) -> list[Any]:
    """JSON values that change when the tokens of a given text may have changed."""
    if config.tokenizer == "bpe":
        return ["bpe", vocab_size]
    if config.tokenizer == "bytes":
        return ["bytes"]
    assert config.pretrained is not None
    path = Path(config.pretrained).expanduser()
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else [folder / "tokenizer.json"]
    files.append(folder / "tokenizer_config.json")
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if path.exists() and file.is_file()]
    return ["pretrained", config.pretrained, *hashes]


def _named_end(file: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json names: a string, or an object with its content."""
    if not file.exists():
        return None
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        token = json.loads(text).get("eos_token")
    except (ValueError, AttributeError, OSError, RecursionError):
        raise DataError(f"{file}: cannot be read as a JSON object") from None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order.

    Printable bytes of Latin-1 stand for themselves, the rest are moved up from 256 in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
