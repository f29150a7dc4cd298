"""The models that all tests of `tools/routing.py` look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from mode.config.settings import ModeConfig
from mode.data.tokenizer import byte_tokenizer
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import save_pretrained
from tests.helpers import DEPTH, EXPERTS, MODEL, spread_weights
from tests.routing_tool.models import KINDS


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A corpus, and an exported folder of every kind of model with random weights."""
    folder = tmp_path_factory.mktemp("routing")
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(8):
        lines = [f"<b>{(number * 37 + i * i) % 97} & text \u00e9</b>" for i in range(60)]
        (corpus / f"{number}.txt").write_text("\n".join(lines))
    byte_tokenizer().save(folder / "tokenizer")
    for seed, (name, (experts, depth)) in enumerate(KINDS.items()):
        config = ModeConfig.from_dict(
            {
                "model": MODEL | {"vocab_size": 257, "num_layers": 4, "sequence_length": 24},
                "experts": None if experts is None else EXPERTS | experts,
                "depth": None if depth is None else DEPTH | depth,
                "data": {
                    "source": "files",
                    "files": {"paths": [str(corpus / "*.txt")]},
                    "tokenizer": "bytes",
                    "validation_fraction": 0.3,
                    "cache_dir": str(folder / "cache"),
                    "document_masking": name == "both",
                },
                "train": {"steps": 1},
            }
        )
        model = spread_weights(ModeTransformer(config), seed=seed)
        save_pretrained(folder / name, config, model.weights(), folder / "tokenizer")
    return folder
