"""Where heads look, as `tools/routing.py` tells it, against plain loops over heads and tokens."""

from __future__ import annotations

import math

import pytest
import torch

from mode.transformer.attention import Attention
from tests import reference
from tests.routing_tool.models import open_model, report
from tools.routes.attention import Watch, attention_figures

ROWS = 4


def by_loops(model, batch, causal):
    """One dictionary per block and head, and what a token could see."""
    taken = []
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [each.register_forward_pre_hook(lambda _, given: taken.append(given[:2])) for each in modules]
    with torch.no_grad():
        model(batch.input_ids, documents=batch.documents, causal=causal)
    for hook in hooks:
        hook.remove()
    return [loops_of_a_block(model, *each, batch) for each in zip(modules, taken, strict=True)]


def loops_of_a_block(model, module, given, batch):
    (x_BSD, grid), settings = given, model.config.model
    heads, groups, width = settings.num_heads, settings.num_kv_heads, settings.head_width
    sums = {name: [0.0] * heads for name in ("entropy", "previous", "repeat")}
    tokens = visible = 0
    chance = 0.0
    for row, ids in enumerate(batch.input_ids.tolist()):
        present = grid.valid_BS
        slots = x_BSD.shape[1] if present is None else int(present[row].sum())
        positions = grid.positions_BS[row, :slots].tolist()
        documents = [0] * len(ids) if batch.documents is None else batch.documents[row].tolist()
        queries, keys = [], []
        for slot, position in enumerate(positions):
            projected = (module.qkv.weight @ x_BSD[row, slot]).reshape(heads + 2 * groups, width)
            queries.append([reference.rotate(projected[n], position, settings.rope_theta) for n in range(heads)])
            keys.append([reference.rotate(projected[heads + g], position, settings.rope_theta) for g in range(groups)])
        for i in range(slots // 2, slots):
            seen = [j for j in range(i + 1) if documents[positions[j]] == documents[positions[i]]]
            after = [j for j in seen if positions[j] > 0 and ids[positions[j] - 1] == ids[positions[i]]]
            tokens, visible, chance = tokens + 1, visible + len(seen), chance + len(after) / len(seen)
            for n in range(heads):
                weights = {
                    j: math.exp(queries[i][n] @ keys[j][n // (heads // groups)] / math.sqrt(width)) for j in seen
                }
                whole = sum(weights.values())
                for j, weight in weights.items():
                    share = weight / whole
                    sums["entropy"][n] -= share * math.log(share)
                    sums["previous"][n] += share * (positions[j] == positions[i] - 1)
                    sums["repeat"][n] += share * (j in after)
    return {
        "visible": visible / tokens,
        "looked_at": [math.exp(each / tokens) for each in sums["entropy"]],
        "previous": [each / tokens for each in sums["previous"]],
        "repeat": [each / tokens for each in sums["repeat"]],
        "repeat_by_chance": chance / tokens,
    }


CASES = [("moe", False), ("both", False), ("both", "predictor"), ("staged", False)]


@pytest.mark.parametrize(("kind", "causal"), CASES)
@torch.no_grad()
def test_where_heads_look_is_that_of_plain_loops(world, kind, causal):
    """With documents that hide each other ("both"), and rows of different length (causal)."""
    model, batches = open_model(world / kind, ROWS, ROWS)
    found = attention_figures(model, batches[:1], causal=causal, device=torch.device("cpu"))
    expected = by_loops(model, batches[0], causal)
    assert found.keys() == {str(layer) for layer in range(len(expected))}
    for layer, each in enumerate(expected):
        for name, value in each.items():
            assert found[str(layer)][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (layer, name)
    assert any(each["repeat_by_chance"] > 0 and max(each["previous"]) > 0 for each in expected)


def test_a_head_that_looks_at_one_token_looks_at_one_and_a_head_without_preference_at_all():
    watch, ids = Watch(num_heads=2), torch.tensor([5, 6, 7, 5, 6, 7, 5, 6])
    positions = torch.arange(8)
    places = torch.eye(8).unsqueeze(1) * 100
    follows = torch.roll(places, -1, dims=2)  # a query that is the key of the token before
    q_SNH = torch.cat([follows, torch.zeros_like(follows)], dim=1)
    watch.add(q_SNH, places, torch.ones(8, 8, dtype=torch.bool).tril(), positions, ids)
    found = watch.figures()
    assert found["looked_at"] == pytest.approx([1.0, (5 * 6 * 7 * 8) ** 0.25]) and found["visible"] == 6.5
    assert found["previous"] == pytest.approx([1.0, (1 / 5 + 1 / 6 + 1 / 7 + 1 / 8) / 4])
    # Tokens 4 to 7 (6 7 5 6): what followed the same before them are the tokens 2, 3, {1, 4} and {2, 5}.
    assert found["repeat_by_chance"] == pytest.approx((1 / 5 + 1 / 6 + 2 / 7 + 2 / 8) / 4)
    assert found["repeat"] == pytest.approx([0.0, found["repeat_by_chance"]], abs=1e-6)


def test_the_report_shows_where_heads_look(world, capsys, tmp_path):
    figures = report(capsys, world / "both", "--sequences", "4", "--output", tmp_path, "--leak", "0")["attention"]
    assert figures.keys() == {"0", "1", "2", "3"} and figures["1"]["visible"] < figures["0"]["visible"]
    page = (tmp_path / "routing.html").read_text()
    assert "looked at by a head" in page and "after the same, at most" in page
