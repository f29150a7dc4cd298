"""Tiny corpora and configurations for the data tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mode.config.settings import DataConfig, FilesConfig, ModeConfig, ModelConfig

WORDS = ["router", "keeps", "some", "tokens", "skips", "others", "depth\n", "\t", "\u00e9t\u00e9", "\U0001f600"]


def make_texts(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Distinct texts."""
    draw = random.Random(seed)
    return [f"{number} " + " ".join(draw.choices(WORDS, k=draw.randrange(1, words))) for number in range(count)]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., ModeConfig]:
    """A configuration for files in `tmp_path`, with its cache there too."""

    def make(*paths: str | Path, vocab_size: int = 300, sequence_length: int = 16, **data: Any) -> ModeConfig:
        text_column = data.pop("text_column", "text")
        values: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.25, **data}
        if paths:
            files = FilesConfig(paths=tuple(str(path) for path in paths), text_column=text_column)
            values.update(source="files", files=files)
        return ModeConfig(
            model=ModelConfig(
                vocab_size=vocab_size,
                num_layers=1,
                width=8,
                num_heads=2,
                num_kv_heads=2,
                ffn_width=8,
                sequence_length=sequence_length,
            ),
            data=DataConfig(**values),
        )

    return make


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Forty text files in `tmp_path/texts`, and their texts in the order of their names."""
    texts = make_texts(40)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:03d}.txt").write_bytes(text.encode())
    return texts
