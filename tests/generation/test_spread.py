"""Causal evaluation and sampling of a model spread over two ranks, ZeRO stage 3 and experts on both."""

from __future__ import annotations

import re

import pytest

from tests import launch


def keep_unevenly() -> None:
    """Rank 0 keeps every token of every routed block in causal use, rank 1 none."""
    import os

    import torch

    from mode.depth.router import Decision, LearnedRouter

    def decide(self, x_BLD, sample_keys_B, positions_BL, method):
        logits_BL = self.scorer.logits(x_BLD).squeeze(-1)
        keep_BL = torch.full_like(logits_BL, os.environ["RANK"] == "0", dtype=torch.bool)
        return Decision(logits_BL, keep_BL, None)

    LearnedRouter.decide = decide


@pytest.mark.parametrize("before", [None, keep_unevenly], ids=["as trained", "rank 1 keeps nothing"])
def test_two_ranks_evaluate_causally_and_sample_where_every_block_is_a_collective(tmp_path, before):
    config = launch.write_tiny(tmp_path)
    settings = ("zero_optimization.stage=3", "mode.experts.ep_size=2", "mode.train.steps=2", "mode.train.eval_every=2")
    arguments = [part for setting in settings for part in ("--set", setting)]
    run_dir = tmp_path / "run"
    job = launch.run(
        ["--deepspeed_config", str(config), "--output_dir", str(run_dir), *arguments], tmp_path / "log", 2, before
    )
    last = launch.metrics(run_dir)[-1]
    assert 0 < last["loss/val_causal"] < 10 and "sample:" in job.output()
    if before is not None:
        assert last["depth/kept_fraction_causal"] == pytest.approx(3 / 5), "of five rows rank 0 has three"
        return
    assert re.search(r"causal loss\s+[\d.]+  \(routed by the predictor", job.output())
    launch.run(
        ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / "one"), *arguments[:-4]]
        + ["--set", "mode.experts.ep_size=1", "--set", "mode.train.steps=2", "--set", "mode.train.eval_every=2"],
        tmp_path / "one.log",
    )
    alone = launch.metrics(tmp_path / "one")[-1]
    for tag in ("loss/val", "loss/val_causal", "depth/kept_fraction_causal"):
        assert last[tag] == pytest.approx(alone[tag], rel=1e-5), tag
