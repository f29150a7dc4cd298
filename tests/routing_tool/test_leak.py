"""What heat maps show, and what top-k routing tells of the future."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mode.training.logging.metrics import decision_image
from tests.routing_tool.models import open_model, report
from tools.routes import leak
from tools.routes.survey import survey, work

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ("mod", "token_choice", "integrated", "both"))
def test_the_heat_map_shows_what_training_shows(world, name):
    model, batches = open_model(world / name, 2, 2)
    for causal in (False, True):
        found = survey(model, batches, causal=causal, device=CPU, advance=lambda: None)
        with torch.no_grad():
            batch = batches[0]
            records = model(
                batch.input_ids, documents=batch.documents, sample_keys=batch.sample_ids, causal=causal
            ).routing
        for row in range(2):
            np.testing.assert_allclose(work(model.config, found, row), decision_image(records, row).numpy())


def full_and_prefix(folder: Path, causal: bool | str, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    model, batches = open_model(folder, 3, 2)
    full = survey(model, batches, causal=causal, device=CPU, advance=lambda: None).losses_NL
    given = {"causal": causal, "device": CPU, "advance": lambda: None}
    return full, leak.prefix_losses(model, batches, positions, **given)


@pytest.mark.parametrize(
    "name, causal", [("dense", False), ("integrated", False), ("mod", "router"), ("both", "predictor")]
)
def test_without_top_k_depth_routing_the_prefix_gives_the_loss_of_the_whole(world, name, causal):
    positions = leak.spread_positions(6, 24)
    full, prefix = full_and_prefix(world / name, causal, positions)
    np.testing.assert_allclose(prefix, full[:, positions], atol=2e-5)


def test_the_leak_is_the_loss_of_the_prefix_less_that_of_the_whole(world, capsys, tmp_path):
    found = report(capsys, world / "both", "--sequences", 3, "--batch_size", 2, "--output", tmp_path, "--leak", 6)[
        "leak"
    ]
    model, batches = open_model(world / "both", 3, 1)
    assert found["positions"] == [1, 5, 9, 13, 17, 21]
    gains, causal = np.zeros((3, 6)), np.zeros((3, 6))
    for row, batch in enumerate(batches):
        ids, documents = batch.input_ids, batch.documents
        for column, position in enumerate(found["positions"]):
            part, end = slice(0, position + 1), ids[0, position + 1]
            with torch.no_grad():
                whole = model(ids, documents=documents).logits[0, position].log_softmax(0)[end]
                prefix = model(ids[:, part], documents=documents[:, part]).logits[0, position].log_softmax(0)[end]
                alone = model(ids, documents=documents, causal="predictor").logits[0, position].log_softmax(0)[end]
            gains[row, column], causal[row, column] = whole - prefix, -alone
    assert np.abs(gains).max() > 0.01, "these weights leak"
    assert found["leak"] == pytest.approx(gains.mean(), abs=1e-5)
    assert found["leak"] == pytest.approx(found["top_k_prefix"] - found["top_k_full"], abs=1e-9)
    assert found["leak_by_position"] == pytest.approx(gains.mean(axis=0).tolist(), abs=1e-5)
    assert found["standard_error"] == pytest.approx(gains.mean(axis=1).std(ddof=1) / 3**0.5, abs=1e-5)
    assert found["causal_full"]["predictor"] == pytest.approx(causal.mean(), abs=1e-5)


def test_positions_of_the_leak_are_spread_and_have_a_next_token():
    assert leak.spread_positions(3, 10) == [1, 4, 7]
    assert leak.spread_positions(100, 4) == [0, 1, 2]
    assert leak.spread_positions(1, 2) == [0]
