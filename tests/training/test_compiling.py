"""torch.compile of the dense parts: same results, same names, and clear words where it cannot be."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch

from mode.config.file import RunConfig, run_config_from_dict
from mode.config.section import ConfigError
from mode.training.loop.compiling import compile_dense_parts
from mode.transformer.model import ModeTransformer
from tests.helpers import DEPTH, EXPERTS, MODEL, spread_weights

CPU = torch.device("cpu")


def config(stage: int = 1, experts: dict[str, Any] | None = EXPERTS) -> RunConfig:
    return run_config_from_dict(
        {
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "mode": {"model": MODEL, "experts": experts, "depth": DEPTH, "train": {"steps": 1, "compile": True}},
        }
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("experts", [EXPERTS, None], ids=["experts", "dense"])
def test_results_gradients_and_names_stay(experts: dict[str, Any] | None) -> None:
    run = config(experts=experts)
    plain = spread_weights(ModeTransformer(run.mode), scale=0.1)
    compiled = copy.deepcopy(plain)
    compile_dense_parts(compiled, run, CPU)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    ids_BL = torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(0))
    for model in (plain, compiled):
        model(ids_BL, labels=ids_BL).loss.backward()
    torch.testing.assert_close(compiled(ids_BL).logits, plain(ids_BL).logits, rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    parts = [body.attention for body in compiled.modules() if hasattr(body, "attention")]
    assert parts and all(part._compiled_call_impl is not None for part in parts)  # not merely left as it was


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"mode\.train\.compile: is true with zero_optimization\.stage 3.*stage 2"):
        compile_dense_parts(ModeTransformer(config().mode), config(stage=3), CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no-such-compiler.*CXX"):
        compile_dense_parts(ModeTransformer(config().mode), config(), CPU)
