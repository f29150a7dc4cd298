"""Evaluating a plain model, in this process."""

from __future__ import annotations

import pytest
import torch

from mode.data.packing import Split, SplitCounts
from mode.moe.router import ExpertRouter
from mode.training.loop.evaluate import evaluate
from mode.transformer.model import ModeTransformer
from tests.helpers import NO_OPS, make_config


def modes(model: ModeTransformer) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("dropping", (False, True))
@pytest.mark.parametrize("fails", (False, True))
def test_an_evaluation_leaves_every_module_in_the_mode_it_was_in(dropping: bool, fails: bool) -> None:
    model = ModeTransformer(make_config(experts={**NO_OPS, "capacity_factor": 1.0}))
    seen: list[set[bool]] = []

    def progress() -> None:
        seen.append({module.training for module in model.modules() if isinstance(module, ExpertRouter)})
        if fails:
            raise KeyboardInterrupt

    for training in (False, True):
        model.train(training)
        model.blocks[1].train(not training)
        before = modes(model)
        try:
            evaluate(
                model,
                Split((torch.arange(64) % 40).view(4, 16).numpy(), SplitCounts(4, 64, 64)),
                num_rows=4,
                batch_size=2,
                end_of_text=None,
                device=torch.device("cpu"),
                progress=progress,
                dropping=dropping,
            )
            assert not fails
        except KeyboardInterrupt:
            assert fails
        assert modes(model) == before
    assert seen and all(found == {dropping} for found in seen)
