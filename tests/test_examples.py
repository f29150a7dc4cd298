"""The worked examples of docs/own_model.md on two ranks equal one process without DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mode
from mode.local_ranks import run_on_ranks
from mode.moe.layer import LocalMoE
from mode.training.loop.engine import start_process_group
from tests.launch import CONTEXT, ROOT
from tests.test_own_loop import whole_weights

EXAMPLES = ROOT / "docs" / "examples"
STEPS, RATE = 3, 0.2
MODELS = {
    "own_gpt": ("own_gpt", ()),
    "llama": ("hugging_face", ("llama",)),
    "qwen3_moe": ("hugging_face", ("qwen3_moe",)),
}
CASES = [(name, stage) for name in MODELS for stage in (1, 3)]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_a_rank() -> tuple[dict[tuple[str, int], Any], str]:
    """(losses and weights of every case, what the examples print as commands)."""
    start_process_group()
    found: dict[tuple[str, int], Any] = {}
    for name, stage in CASES:
        file, family = MODELS[name]
        example = load(file)
        engine, losses = example.train(example.settings(stage, "SGD", RATE), *family, ep_size=2, steps=STEPS)
        total = torch.tensor(losses, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        found[name, stage] = ((total / 2).tolist(), whole_weights(engine))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for file in ("own_gpt", "hugging_face"):
            sys.argv = [file, "--local_rank=0", "--steps=20", "--ep_size=2"]
            load(file).main()
    return found, printed.getvalue()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[tuple[str, int], Any], str]]:
    return run_on_ranks(on_a_rank, 2, seconds=300, context=CONTEXT)


@functools.cache
def one_process(name: str, parts: int = 2, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of the example's model and batches in a loop without DeepSpeed.

    A batch comes in `parts` micro-batches: with 2, those of the ranks, the rounding of float32 is theirs, too. With 1 a
    loss of 5.5 was seen 1.1e-6 away from float64, that of two ranks 6e-8.
    """
    file, family = MODELS[name]
    example = load(file)
    model = example.build(*family).to(dtype)

    def loss_of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss if family else model(ids)

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        passes, found = [], []
        for ids in example.batch(step).chunk(parts):
            with mode.collect_routing(model) as records:
                loss = loss_of(ids)
            ((loss + mode.auxiliary_loss(records)) / parts).backward()
            passes.append(records)
            found.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mode.after_step(model, passes)
        losses.append(sum(found) / parts)
    model.eval()
    with torch.no_grad():
        losses.append(sum(loss_of(ids).item() for ids in example.batch(STEPS).chunk(parts)) / parts)
    return losses, {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", ["own_gpt", "llama"])
def test_one_process_does_not_depend_on_how_a_batch_is_divided(name: str) -> None:
    (losses, weights), (whole_losses, whole) = (one_process(name, parts, torch.float64) for parts in (2, 1))
    torch.testing.assert_close(weights, whole, rtol=0, atol=1e-10)
    assert losses == pytest.approx(whole_losses, abs=1e-10 if name == "own_gpt" else 1e-6)  # transformers': in float32


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_an_example_on_two_ranks_with_shared_experts_equals_one_process(ranks, name: str, stage: int) -> None:
    losses, weights = one_process(name)
    for found, _ in ranks:
        actual_losses, actual_weights = found[name, stage]
        assert actual_losses == pytest.approx(losses, abs=1e-6)
        assert actual_weights.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(
                actual_weights[key], weight.detach(), rtol=0, atol=1e-6, msg=lambda m, n=key: f"{n}: {m}"
            )


def test_the_commands_print_falling_losses_on_the_first_rank_alone(ranks) -> None:
    (_, first), (_, second) = ranks
    losses = [float(loss) for loss in re.findall(r"(?:step 20|evaluation): loss ([\d.]+)", first)]
    assert len(losses) == 4 and max(losses) < 4.0 < math.log(256)
    assert "loss" not in second


def test_the_examples_models_learn_keep_half_and_move_their_biases() -> None:
    for name in MODELS:
        losses, weights = one_process(name)
        assert losses[2] < losses[0], name
        assert any(weight.any() for key, weight in weights.items() if key.endswith("bias_J")), name
        assert {int(weight) for key, weight in weights.items() if key.endswith("steps_done")} == {STEPS}, name


PAGE = (ROOT / "docs" / "own_model.md").read_text()


def test_the_loop_of_the_page_stands_in_both_examples() -> None:
    loop = PAGE[PAGE.index("## The loop") :].split("```")[1]
    lines = {line.strip() for line in loop.splitlines()[1:] if line.strip()} - {"loss = engine(ids)"}
    for name, own in (("own_gpt", "build(ep_size)"), ("hugging_face", "build(family, ep_size)")):
        source = (EXAMPLES / f"{name}.py").read_text()
        missing = [line for line in lines if line.replace("build(ep_size)", own) not in source]
        assert len(lines) == 6 and not missing, name


def test_the_page_names_every_argument_of_the_layers_and_every_file_it_links() -> None:
    for layer in (LocalMoE, mode.DepthRouted):
        for name in list(inspect.signature(layer.__init__).parameters)[1:]:
            assert name == "deepspeed_only" or f"`{name}`" in PAGE, name
    for link in re.findall(r"\]\(([\w./]+)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_the_arguments_of_the_readmes_layers_are_arguments() -> None:
    block = next(each for each in (ROOT / "README.md").read_text().split("```python") if "mode.MoE(" in each)
    scope: dict[str, Any] = {"mode": mode, "width": 8, "block": nn.Linear(8, 8), "self": nn.Module()}
    exec(block.split("```")[0].replace("ep_size=2", "ep_size=1"), scope)
    x = torch.randn(2, 16, 8)
    assert scope["self"].moe(x)[0].shape == scope["self"].block(x).shape == x.shape
