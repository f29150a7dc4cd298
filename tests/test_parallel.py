"""Experts spread over ranks compute what they compute on one, whatever each rank has to send."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import deepspeed.runtime.engine
import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, distributed

from mode import accounting
from mode.accounting import BlockCounts
from mode.config.settings import ExpertsConfig
from mode.costs import routing_costs
from mode.local_ranks import run_on_ranks
from mode.moe.deepspeed import MoE
from mode.moe.layer import LocalMoE
from mode.records import collect_routing
from mode.training.loop.engine import start_process_group
from mode.transformer.model import ModeTransformer
from tests.helpers import EXPERTS, make_config, spread_weights
from tests.launch import CONTEXT

WIDTH = 16
NO_OPS = {"num_no_ops": 2, "no_op_fraction": 0.25, "balance_bias": {"rate": 0.1}}

# name -> (settings of the experts, tokens of each rank, selection bias of each column or None)
LAYERS: dict[str, tuple[dict[str, Any], list[int], list[float] | None]] = {
    "ranks with different numbers of tokens": ({}, [5, 3, 8, 1], None),
    "one choice per token": ({"top_k": 1}, [7, 2, 3, 4], None),
    "every expert per token": ({"top_k": 4}, [3, 2, 1, 4], None),
    "a rank without tokens": ({}, [0, 4, 3, 0], None),
    "one token on one rank": ({}, [0, 0, 1, 0], None),
    "no token anywhere": ({}, [0, 0, 0, 0], None),
    "no-ops beside experts": (NO_OPS, [6, 5, 4, 3], None),
    "all choices are no-ops": (NO_OPS, [3, 2, 1, 4], [-99.0] * 4 + [0.0] * 2),
    "an expert that none chooses": (NO_OPS, [6, 5, 4, 3], [0.0, -99.0, 0.0, 0.0, 0.0, 0.0]),
    "all choices go to one rank's experts": (NO_OPS | {"top_k": 1}, [6, 5, 4, 3], [99.0] + [0.0] * 5),
    "shared experts": ({"num_shared": 2}, [5, 3, 2, 1], None),
    "dropped choices": ({"capacity_factor": 0.5}, [9, 8, 7, 6], None),
}


def whole_and_part(name: str) -> tuple[LocalMoE, MoE, list[Tensor]]:
    """The plain layer, the same one with this rank's experts only, and the tokens of every rank."""
    settings, sizes, bias = LAYERS[name]
    world_size = distributed.get_world_size()
    config = ExpertsConfig.from_dict(EXPERTS | settings | {"ep_size": world_size})
    whole = spread_weights(LocalMoE(WIDTH, config=config)).double()
    part = MoE(WIDTH, config=config).double()
    part.set_deepspeed_parallelism()
    local = slice(part.experts.first, part.experts.first + part.num_local_experts)
    weights = dict(whole.state_dict())
    for key in ("experts.w1", "experts.w2", "experts.w3"):
        weights[key] = weights[key][local]
    part.load_state_dict(weights)
    if bias is not None:
        for layer in (whole, part):
            layer.router.bias_J.copy_(torch.tensor(bias))
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes[:world_size]]
    return whole, part, [x.requires_grad_() for x in tokens]


def compare_layer(name: str) -> dict[str, float]:
    """Largest differences of outputs and of every gradient between the two, on this rank.

    The plain layer takes each rank's tokens by themselves, as dropping is per rank.
    """
    whole, part, tokens = whole_and_part(name)
    rank = distributed.get_rank()
    outputs = [whole(x)[0] for x in tokens]
    mine = tokens[rank].detach().requires_grad_()
    out = part(mine)[0]
    directions = [
        torch.cos(torch.arange(x.numel(), dtype=torch.float64) + number).view_as(x) for number, x in enumerate(tokens)
    ]
    torch.stack([(o * d).sum() for o, d in zip(outputs, directions, strict=True)]).sum().backward()
    (out * directions[rank]).sum().backward()
    found = {"output": distance(out, outputs[rank]), "input": distance(mine.grad, tokens[rank].grad)}
    for key, parameter in part.named_parameters():
        expected = whole.get_parameter(key).grad
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if key.startswith("experts."):
            expected = None if expected is None else expected[part.experts.first :][: part.num_local_experts]
        else:
            distributed.all_reduce(gradient)
        found[key] = distance(gradient, torch.zeros_like(gradient) if expected is None else expected)
    return found


def distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("nan")
    return (a - b).abs().max().item() if a.numel() else float(a.shape != b.shape)


def count_bytes(no_op_bias: float) -> dict[str, Any]:
    """What one block's expert layer hands to every all-to-all of a training step, beside the accounting."""
    world_size = distributed.get_world_size()
    config = make_config(
        experts=NO_OPS | {"ep_size": world_size}, model={"width": WIDTH, "activation_checkpointing": False}
    )
    assert config.experts is not None
    layer = MoE(WIDTH, config=config.experts)
    layer.set_deepspeed_parallelism()
    spread_weights(layer)
    layer.router.bias_J[4:] += no_op_bias
    sent: list[int] = []
    real = distributed.all_to_all_single

    def counting(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:
        if input.is_floating_point():  # the table of counts that goes ahead is not
            sent.append(input.numel() * input.element_size())
        return real(output, input, *arguments, **options)

    distributed.all_to_all_single = counting
    try:
        x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(distributed.get_rank()), requires_grad=True)
        with collect_routing(layer) as records:
            out = layer(x)[0]
        routing = records[0].routing
        out.square().mean().backward()
    finally:
        distributed.all_to_all_single = real
    counts = BlockCounts(1, 24, 24, 24, int(routing.num_processed()), int(routing.num_no_op()), 0)
    received = sum(int(n) for n in all_counts(routing.choice_counts_J()[:4])[layer.experts.first :][: 4 // world_size])
    return {
        "sent": sent,
        "processed": counts.processed,
        "accounting": accounting.all_to_all_bytes(config, counts, element_size=4),
        "costs": routing_costs(records)[0].all_to_all_bytes,
        "answered": received * WIDTH * 4,
        "number": accounting.all_to_alls_per_block(config),
    }


def all_counts(counts_E: Tensor) -> list[float]:
    total = counts_E.clone()
    distributed.all_reduce(total)
    return total.tolist()


def evaluate_unevenly() -> dict[str, tuple[int, float]]:
    """Causal forward passes in which rank 0 alone keeps tokens, then none does: (kept, difference to one rank)."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    config = make_config(experts=NO_OPS | {"ep_size": world_size}, depth={"predictor": {"width": 4}})
    model = ModeTransformer(config, MoE).eval()
    plain = ModeTransformer(config).eval()
    for module in model.modules():
        if isinstance(module, MoE):
            module.set_deepspeed_parallelism()
    ids = torch.arange(32).view(2, 16)
    found = {}
    for name, keeps in (("rank 0 alone", rank == 0), ("none", False)):
        for layers in (model, plain):
            predictor = layers.blocks[1].router.predictor
            spread_weights(predictor) if keeps else [p.data.zero_() for p in predictor.parameters()]
        with torch.no_grad():
            out, expected = model(ids, causal=True), plain(ids, causal=True)
        found[name] = (int(out.routing[1].depth.kept_BL().sum()), distance(out.logits, expected.logits))
    return found


def on_a_rank() -> dict[str, Any]:
    start_process_group()
    torch.set_num_threads(1)
    return {
        "layers": {name: compare_layer(name) for name in LAYERS},
        "bytes": {bias: count_bytes(bias) for bias in (-99.0, 0.0, 2.0, 99.0)},
        "evaluation": evaluate_unevenly(),
    }


@pytest.fixture(scope="module", params=(2, 4), ids=("2 ranks", "4 ranks"))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, request.param, seconds=100, context=CONTEXT)


@pytest.mark.parametrize("name", LAYERS)
def test_experts_on_several_ranks_match_one_rank_in_outputs_and_gradients(ranks: Any, name: str) -> None:
    for rank, found in enumerate(ranks):
        worst = max(found["layers"][name].items(), key=lambda item: item[1])
        assert worst[1] <= 1e-10, f"rank {rank}: {worst}"  # also fails for nan


@pytest.mark.parametrize("bias", (-99.0, 0.0, 2.0, 99.0))
def test_an_all_to_all_sends_real_choices_and_nothing_else(ranks: Any, bias: float) -> None:
    for found in ranks:
        figures = found["bytes"][bias]
        assert figures["processed"] * WIDTH * 4 == figures["accounting"] == figures["costs"]
        out, back = figures["accounting"], figures["answered"]
        # dispatch, combine, then their gradients in reverse: what went out comes back, and the other way round
        assert figures["sent"] == [out, back, out, back] and len(figures["sent"]) == figures["number"]
    totals = [sum(found["bytes"][bias]["processed"] for found in ranks) for bias in (-99.0, 0.0, 2.0, 99.0)]
    assert totals[0] > totals[1] > totals[2] > totals[3] == 0


def test_a_rank_that_keeps_no_token_takes_part_in_the_block_all_the_same(ranks: Any) -> None:
    kept = [found["evaluation"]["rank 0 alone"][0] for found in ranks]
    assert kept[0] > 0 and not any(kept[1:])
    assert not any(found["evaluation"]["none"][0] for found in ranks)
    for found in ranks:
        assert all(difference <= 1e-5 for _, difference in found["evaluation"].values())


def test_the_engine_finds_every_attribute_it_reads_from_an_expert_layer() -> None:
    """By DeepSpeed's own source: where it asks whether a module is an AutoEP layer, what it then reads of it."""
    layer = MoE(WIDTH, config=ExpertsConfig.from_dict(EXPERTS))
    read: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(deepspeed.runtime.engine))):
        if isinstance(node, ast.If) and "isinstance(module, _AutoEPMoELayer)" in ast.unparse(node.test):
            read |= {
                found.attr
                for part in node.body
                for found in ast.walk(part)
                if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "module"
            }
    assert {"num_experts", "ep_group_name", "expert_placement_descriptor"} <= read, "DeepSpeed asks in another way now"
    missing = sorted(name for name in read if not hasattr(layer, name))
    assert not missing, f"DeepSpeed's engine reads {missing} of an expert layer; set them in mode/moe/deepspeed.py"


def test_what_we_set_on_a_layer_is_what_deepspeed_sets_on_its_own() -> None:
    source = inspect.getsource(AutoEPMoELayer.__init__)
    ours = MoE(WIDTH, config=ExpertsConfig.from_dict(EXPERTS))
    plain = set(vars(LocalMoE(WIDTH, config=ExpertsConfig.from_dict(EXPERTS))))
    for name in sorted(set(vars(ours)) - plain):
        assert f"self.{name} = " in source, (
            f"AutoEPMoELayer no longer sets {name!r}: mode/moe/deepspeed.py relies on it"
        )
    for name in ("allreduce", "group_name", "ds_zero_placement_family", "ds_zero_partition_group_name"):
        assert f"param.{name} = " in source, f"AutoEPMoELayer no longer marks parameters with {name!r}"
        assert hasattr(ours.experts.w1, name)
