"""What an optimizer step holds on to. A real process with a real engine."""

from __future__ import annotations

import weakref
from typing import Any

from tests import launch


def refuse_to_run_beside_earlier_logits() -> None:
    """A forward pass fails while the logits of the one before are still in memory."""
    from mode.transformer.model import ModeTransformer

    original, earlier = ModeTransformer.forward, []

    def forward(self: ModeTransformer, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            assert not any(logits() is not None for logits in earlier), "the logits of an earlier micro-batch are alive"
        out = original(self, *args, **kwargs)
        if self.training:
            earlier.append(weakref.ref(out.logits))
        return out

    ModeTransformer.forward = forward


def test_logits_are_freed_before_the_next_forward_pass(tmp_path):
    config = launch.write_tiny(tmp_path)
    settings = ["gradient_accumulation_steps=2", "mode.train.steps=2", "mode.train.monitor=detailed"]
    arguments = ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / "run")]
    arguments += [argument for setting in settings for argument in ("--set", setting)]
    launch.run(arguments, tmp_path / "log", before=refuse_to_run_beside_earlier_logits)
    assert launch.metrics(tmp_path / "run")[-1]["step"] == 2
