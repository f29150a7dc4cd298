"""Our layers in somebody's own model, trained by a loop of their own on DeepSpeed's engine, equal one process."""

from __future__ import annotations

import itertools
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import mode
from mode.local_ranks import run_on_ranks
from mode.training.loop.engine import start_process_group
from tests.launch import CONTEXT
from tests.own_model import EXPERTS, Case, OwnModel, batches, build, settings, train_step

STEPS = 3
LAYOUTS = [
    Case(ep_size, stage, clip, accumulation)
    for ep_size, stage, clip, accumulation in itertools.product((1, 2), (0, 1, 2, 3), (0.0, 0.2), (1, 2))
]
SPECIAL = [
    *(Case(2, stage, 0.2, copied=True) for stage in (1, 3)),
    *(Case(ep_size, 3, 0.2, partitioned=True) for ep_size in (1, 2)),
]


def one_process(clip: float) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of the same training without DeepSpeed."""
    model = OwnModel(**EXPERTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        with mode.collect_routing(model) as records:
            loss = model(batches(step))
        (loss + mode.auxiliary_loss(records)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        mode.after_step(model, records)
        losses.append(loss.item())
    return losses, model.state_dict()


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Every parameter and buffer by name, the experts of all ranks together."""
    found = {}
    for name, buffer in engine.module.named_buffers():
        found[name] = buffer.clone()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weight = parameter.detach().clone()
        layer = engine.module.get_submodule(name.rpartition(".experts.")[0]) if ".experts." in name else None
        if isinstance(layer, mode.MoE) and layer.ep_size > 1:
            parts = [torch.empty_like(weight) for _ in range(layer.ep_size)]
            torch.distributed.all_gather(parts, weight, group=layer.ep_group)
            weight = torch.cat(parts)
        found[name] = weight
    return found


def train(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    world_size = torch.distributed.get_world_size()
    model, config = build(case, world_size), settings(case, world_size)
    needs_help = case.stage == 0 and case.ep_size > 1 and case.clip > 0
    start = mode.initialize if needs_help else deepspeed.initialize
    engine = start(model=model, config=config, model_parameters=list(model.parameters()))[0]
    losses = [train_step(engine, step, case) for step in range(STEPS)]
    total = torch.tensor(losses)
    torch.distributed.all_reduce(total)
    return (total / world_size).tolist(), whole_weights(engine)


def on_a_rank() -> dict[Case, Any]:
    start_process_group()
    return {case: train(case) for case in LAYOUTS + SPECIAL}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Case, Any]]:
    return run_on_ranks(on_a_rank, 2, seconds=500, context=CONTEXT)


@pytest.fixture(scope="module")
def expected() -> dict[float, Any]:
    return {clip: one_process(clip) for clip in (0.0, 0.2)}


@pytest.mark.parametrize("case", LAYOUTS + SPECIAL, ids=str)
def test_every_layout_of_a_users_own_loop_equals_one_process(ranks, expected, case: Case) -> None:
    losses, weights = expected[case.clip]
    for found in ranks:
        assert found[case][0] == pytest.approx(losses, abs=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(
                found[case][1][name], weight, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n} {m}"
            )


def test_the_reference_trains_clips_and_moves_its_biases(expected) -> None:
    assert expected[0.0][0] != expected[0.2][0]
    assert any(weight.any() for name, weight in expected[0.0][1].items() if name.endswith("bias_J"))
