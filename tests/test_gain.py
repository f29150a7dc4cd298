"""`tools/gain.py`: where the gain of a larger model lies, against gains that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mode.data import prepare_data, spread_rows
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import save_pretrained
from tests.helpers import make_config, spread_weights
from tools import gain


def export(folder: Path, name: str, seed: int, **settings: object) -> tuple[ModeTransformer, str]:
    """A model with random weights and its folder, with the files of `folder` as its text."""
    data = {"source": "files", "files": {"paths": [str(folder / "*.txt")]}, "tokenizer": "bytes"}
    model = {"vocab_size": 257, "sequence_length": 16} | settings
    data |= {"validation_fraction": 0.5, "cache_dir": str(folder / "cache")}
    config = make_config(model=model, data=data)
    made = spread_weights(ModeTransformer(config), seed=seed).eval()
    prepare_data(config).tokenizer.save(folder / "tokenizer")
    save_pretrained(folder / name, config, made.weights(), folder / "tokenizer")
    return made, str(folder / name)


@pytest.fixture
def folder(tmp_path) -> Path:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(" ".join(str(number * i) for i in range(60)))
    return tmp_path


def test_a_gain_on_one_kind_lies_on_its_tokens_and_an_even_one_everywhere():
    kinds_BL = torch.arange(8).repeat(4, 2)  # every kind is an eighth of the tokens
    on_one = (kinds_BL == 5).double()
    assert gain.held(on_one, kinds_BL, [0.0625, 0.125, 0.5, 1.0]) == pytest.approx([0.5, 1.0, 1.0, 1.0])
    even = torch.ones(4, 16, dtype=torch.float64)
    assert gain.held(even, kinds_BL, [0.0625, 0.125, 0.5, 1.0]) == pytest.approx([0.0625, 0.125, 0.5, 1.0])


def test_the_shares_are_those_of_a_plain_count_of_uneven_kinds():
    kinds_BL = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]).repeat(2, 1)
    values = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)  # ranked 1, 2, 0; in all 3 + 8 + 6 = 17
    found = gain.held(values[kinds_BL], kinds_BL, [0.25, 0.5, 0.625])
    assert found == pytest.approx([8 / 17, (8 + 2 * 2) / 17, 14 / 17])


def test_chance_does_not_look_like_a_choice():
    generator = torch.Generator().manual_seed(0)
    gain_BL = 1 + torch.randn(64, 64, generator=generator, dtype=torch.float64)
    kinds_BL = torch.arange(64).repeat(64, 1)  # of 64 sightings each, that differ by luck alone
    assert gain.held(gain_BL, kinds_BL, [0.25])[0] == pytest.approx(0.25, abs=0.02)
    best = gain_BL.sum(dim=0).sort(descending=True).values[:16].sum() / gain_BL.sum()
    assert best > 0.28, "ranked by what is summed, it would"


@pytest.mark.parametrize("masking", [False, True])
def test_losses_and_gain_are_those_of_the_two_models(folder, capsys, masking):
    models = [export(folder, name, seed) for name, seed in (("a", 2), ("b", 0))]  # by luck b is clearly better
    if masking:
        for _, path in models:
            about = json.loads((Path(path) / "config.json").read_text())
            about["mode"]["data"]["document_masking"] = True
            (Path(path) / "config.json").write_text(json.dumps(about))
    paths = [path for _, path in models]
    assert gain.main([*paths, "--sequences", "5", "--batch_size", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    data = prepare_data(models[0][0].config)
    rows_BL = torch.as_tensor(spread_rows(data.validation.rows, 5)).long()
    ends_BL = rows_BL == data.tokenizer.end_of_text
    documents_BL = ends_BL.cumsum(dim=1) - ends_BL.long() if masking else None
    losses = []
    for model, _ in models:
        with torch.no_grad():
            logits_BLV = model(rows_BL, documents=documents_BL).logits
        losses.append(F.cross_entropy(logits_BLV[:, :-1].transpose(1, 2), rows_BL[:, 1:], reduction="none").double())
    assert figures["sequences"] == 5
    for name, expected in zip(("smaller", "larger"), losses, strict=True):
        assert figures["loss"][name] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert figures["gain"] == pytest.approx((losses[0] - losses[1]).mean().item(), abs=1e-5)
    assert figures["better_share"] == pytest.approx((losses[0] > losses[1]).double().mean().item())
    assert figures["shares_of_the_gain"]["token"] == pytest.approx(
        gain.held(losses[0] - losses[1], rows_BL[:, :-1], [0.125, 0.25, 0.5]), rel=1e-3
    )


def test_the_table_names_both_models_and_says_where_there_is_no_gain(folder, capsys):
    (_, one), (_, two) = (export(folder, name, seed) for name, seed in (("a", 2), ("b", 0)))
    shown = {}
    for pair in ((one, two), (two, one)):
        assert gain.main(list(pair)) == 0
        shown[pair] = capsys.readouterr().out
        assert all(path in shown[pair] for path in pair) and "held-out sequences" in shown[pair]
    assert sum("no gain to divide" in text for text in shown.values()) == 1
    assert sum("share of the gain that lies on so many of the tokens" in text for text in shown.values()) == 1


def test_a_gain_that_is_not_clear_is_not_divided(folder, capsys):
    (_, one), (_, two) = (export(folder, name, seed) for name, seed in (("a", 0), ("b", 1)))
    for pair in ((one, two), (two, one)):
        assert gain.main([*pair, "--sequences", "5", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures["gain"] < 2 * figures["gain_error"] and figures["shares_of_the_gain"] is None


def test_wrong_input_is_one_line(folder, capsys):
    _, one = export(folder, "a", 0)
    _, longer = export(folder, "long", 0, sequence_length=32)

    def fails(*arguments: str) -> str:
        assert gain.main(list(arguments)) == 2
        return capsys.readouterr().err

    assert "gives other held-out tokens or sequences" in fails(one, longer)
    assert "--capacities: has 2; a share is at most 1" in fails(one, one, "--capacities", "0.5", "2")
    assert "--sequences: leaves 1 held-out sequence" in fails(one, one, "--sequences", "1")
    assert "does not exist; name a run directory" in fails(one, str(folder / "no"))
