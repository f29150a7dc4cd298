"""The numbers of `tools/routing.py`, against plain loops over single sequences."""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mode import accounting
from mode.transformer.model import ModeOutput
from tests.routing_tool.models import open_model, routing
from tools.routes import figures


def ranks_by_counting(values: list[float]) -> list[float]:
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def test_the_best_threshold_is_the_best_of_all() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 9)).astype(np.float32)
    kept = (logits >= np.sort(logits, axis=1)[:, -2:-1]).astype(np.int64)  # the two largest of each row
    found = figures.best_threshold(logits, kept)
    levels = [*logits.ravel(), np.inf]
    assert found["agrees"] == max(((logits >= level) == kept).mean() for level in levels) < 1
    assert ((logits >= found["logit"]) == kept).mean() == found["agrees"]
    assert figures.best_threshold(logits, np.zeros_like(kept))["agrees"] == 1  # nothing kept: above all of them


def test_the_rank_correlation_is_that_worked_out_by_hand_with_ties():
    assert figures.average_ranks([1, 2, 2, 3]).tolist() == [1, 2.5, 2.5, 4]
    assert figures.average_ranks([10, 30, 20, 20]).tolist() == [1, 4, 2.5, 2.5]
    # Deviations from the mean rank 2.5: -1.5 0 0 1.5 and -1.5 1.5 0 0; 2.25 / sqrt(4.5 * 4.5)
    assert figures.rank_correlation([1, 2, 2, 3], [10, 30, 20, 20]) == pytest.approx(0.5)
    assert figures.rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert figures.rank_correlation([1, 1, 1], [1, 2, 3]) is None


CAUSAL: dict[str, bool | str] = {"top_k": False, "predictor": "predictor", "router": "router"}
ROWS, LENGTH, LAYERS, EXPERTS = 5, 24, 4, 4


@dataclass
class Loops:
    """What one forward pass per sequence and method comes to, by loops over blocks, slots and choices."""

    losses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSAL, 0.0))
    kept: dict[str, list[int]] = field(default_factory=lambda: {name: [0] * LAYERS for name in CAUSAL})
    # Of the shown method alone:
    above: list[int] = field(default_factory=lambda: [0] * LAYERS)
    choices: list[list[int]] = field(default_factory=lambda: [[0] * (EXPERTS + 1) for _ in range(LAYERS)])
    gates: list[float] = field(default_factory=lambda: [0.0] * LAYERS)  # of the choices of real experts
    flops: int = 0
    blocks: list[int] = field(default_factory=list)  # routed blocks that each token enters
    real: list[int] = field(default_factory=list)  # choices of real experts of each token
    entropies: list[float] = field(default_factory=list)

    def add(self, out: ModeOutput, name: str, shown: bool) -> None:
        self.losses[name] += float(out.losses["cross_entropy"]) / ROWS
        entered, real = [[0] * LENGTH for _ in range(LAYERS)], [0] * LENGTH
        for layer, record in enumerate(out.routing):
            positions = record.positions_BS[0].tolist()
            self.kept[name][layer] += len(positions)
            for slot, position in enumerate(positions):
                entered[layer][position] = 1
                chosen = zip(
                    record.experts.choices_TK[slot].tolist(), record.experts.gates_TK[slot].tolist(), strict=True
                )
                for choice, gate in chosen:
                    real[position] += choice < EXPERTS
                    self.gates[layer] += gate * (choice < EXPERTS) * shown
                    self.choices[layer][choice] += shown
            if record.depth is not None and shown:
                self.above[layer] += sum(1 / (1 + math.exp(-r)) > 0.5 for r in record.depth.logits_BL[0].tolist())
        if shown:
            self.blocks += [entered[1][i] + entered[3][i] for i in range(LENGTH)]
            self.real += real
            self.entropies += torch.distributions.Categorical(logits=out.logits[0].double()).entropy().tolist()


@pytest.fixture(scope="module", params=("top_k", "predictor"))
def shown(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(world, shown, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("numbers")
    options = ["--sequences", str(ROWS), "--batch_size", "3", "--causal", shown, "--output", str(folder), "--leak", "0"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert routing.main([str(world / "both"), *options, "--json"]) == 0
    figures = json.loads(printed.getvalue())
    assert json.loads((folder / "routing.json").read_text()) == figures
    return figures


@pytest.fixture(scope="module")
def loops(world, shown) -> Loops:
    model, batches = open_model(world / "both", ROWS, 1)
    sums = Loops()
    for name, causal in CAUSAL.items():
        for batch in batches:
            ids = batch.input_ids
            with torch.no_grad():
                out = model(ids, labels=ids, documents=batch.documents, causal=causal)
            sums.add(out, name, name == shown)
            if name == shown:
                sums.flops += accounting.model_flops(model.config, [record.counts() for record in out.routing]).forward
    return sums


def test_losses_and_flops_are_those_of_plain_loops(found, loops):
    assert found["loss"] == pytest.approx(loops.losses, rel=1e-5)
    assert found["flops_per_token"]["mean"] == pytest.approx(loops.flops / (ROWS * LENGTH), rel=1e-9)


def test_depth_figures_are_those_of_plain_loops(found, loops):
    depth, above = found["depth"], loops.above
    for layer in (1, 3):
        block = depth["blocks"][str(layer)]
        assert block["kept"] == pytest.approx({name: loops.kept[name][layer] / (ROWS * LENGTH) for name in CAUSAL})
        assert block["above_half"] == pytest.approx(above[layer] / (ROWS * LENGTH))
    assert depth["blocks"].keys() == {"1", "3"}
    assert depth["above_half"] == pytest.approx((above[1] + above[3]) / (2 * ROWS * LENGTH))
    assert sum(depth["histogram"]["counts"]) == 2 * ROWS * LENGTH
    assert sum(depth["histogram"]["counts"][20:]) == above[1] + above[3]


def test_expert_figures_are_those_of_plain_loops(found, loops, shown):
    for layer, choices in enumerate(loops.choices):
        block, load = found["experts"]["blocks"][str(layer)], choices[:EXPERTS]
        assert block["choices"] == choices and sum(choices) == 2 * loops.kept[shown][layer]
        assert block["no_op_share"] == pytest.approx(choices[EXPERTS] / sum(choices))
        assert block["mean_gate"] == pytest.approx(loops.gates[layer] / sum(load))
        assert block["imbalance"] == pytest.approx(max(load) / (sum(load) / EXPERTS))


@pytest.mark.parametrize("name", ("blocks", "real_choices"))
def test_the_entropy_by_work_is_that_of_plain_loops(found, loops, name):
    counts, entropies = {"blocks": loops.blocks, "real_choices": loops.real}[name], loops.entropies
    assert found["entropy"]["mean"] == pytest.approx(np.mean(entropies), rel=1e-5)
    relation = found["entropy"]["by"][name]
    expected = np.corrcoef(ranks_by_counting(counts), ranks_by_counting(entropies))[0, 1]
    assert relation["rank_correlation"] == pytest.approx(expected, abs=2e-4), "entropies of float32 may swap ranks"
    assert {group["count"]: group["tokens"] for group in relation["groups"]} == {
        count: counts.count(count) for count in set(counts)
    }
    for group in relation["groups"]:
        of_group = [entropy for count, entropy in zip(counts, entropies, strict=True) if count == group["count"]]
        assert group["mean"] == pytest.approx(np.mean(of_group), rel=1e-5)
        assert group["quartiles"][1] == pytest.approx(np.median(of_group), rel=1e-5)
