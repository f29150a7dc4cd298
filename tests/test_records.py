"""Collecting what routed layers decide: once each, from the model asked for, and kept alive by nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mode
from mode import accounting
from mode.accounting import Flops, LayerCosts
from mode.transformer.model import ModeTransformer
from tests.helpers import make_config, spread_weights
from tests.own_model import EXPERTS, LENGTH, ROWS, OwnModel, batches
from tests.test_flops import counted

D = 8
SETTINGS: dict[str, Any] = {"num_experts": 4, "k": 2, "num_no_ops": 2, "no_op_fraction": 0.25, "bias_rate": 0.1}


class Checkpointed(nn.Module):
    """A model of somebody's own that runs its layers under activation checkpointing: None, or whether reentrant."""

    def __init__(self, *reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(
            mode.MoE(D, expert_width=6, layer=layer, z_loss_weight=0.1, **SETTINGS) for layer in range(len(reentrant))
        )
        self.depth = mode.DepthRouted(nn.Linear(D, D), D, 0.5, aux_weight=0.3, layer=9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, reentrant in zip(self.layers, self.reentrant, strict=True):
            moe = lambda x, layer=layer: layer(x)[0]  # noqa: E731
            x = x + (moe(x) if reentrant is None else checkpoint(moe, x, use_reentrant=reentrant))
        if self.reentrant[0] is None:
            return self.depth(x)
        return checkpoint(self.depth, x, use_reentrant=self.reentrant[0])


def build(*reentrant: bool | None) -> Checkpointed:
    return spread_weights(Checkpointed(*reentrant)).double()


def tokens() -> Tensor:
    return torch.randn(2, 6, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_a_pass_that_checkpointing_repeats_is_counted_once_and_its_losses_carry_gradients() -> None:
    found = []
    for reentrant in (None, False):
        model = build(reentrant, reentrant)
        with mode.collect_routing(model) as records:  # backward inside, too: the repeated pass is not collected
            output = model(tokens())
            loss = mode.auxiliary_loss(records)
            (output.square().mean() + loss).backward()
        assert [record.name for record in records] == ["layers.0", "layers.1", "depth"]
        counts = [record.routing.choice_counts_J() for record in records[:2]]
        assert all(int(each.sum()) == 2 * 12 for each in counts)
        found.append((loss, [parameter.grad for parameter in model.parameters()], counts))
    (plain, plain_gradients, plain_counts), (repeated, gradients, repeated_counts) = found
    assert torch.equal(plain, repeated) and all(map(torch.equal, plain_counts, repeated_counts))
    for expected, actual in zip(plain_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert all(gradient.any() for gradient in gradients)


def test_the_auxiliary_loss_is_the_weighted_sum_of_what_the_layers_return() -> None:
    model = build(None, None)
    with mode.collect_routing(model) as records:
        model(tokens())
    x = model.first(tokens())
    returned = []
    for layer in model.layers:
        out, l_aux, _ = layer(x)
        x = x + out
        returned.append(l_aux)
    depth = 0.3 * records[2].losses["depth_aux"]
    torch.testing.assert_close(mode.auxiliary_loss(records), sum(returned) + depth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reentrant", [(True, True), (None, True)], ids=str)
def test_under_reentrant_checkpointing_losses_without_gradient_are_an_error(reentrant: tuple[bool | None, ...]) -> None:
    model = build(*reentrant)
    with mode.collect_routing(model) as records:
        model(tokens())
    with pytest.raises(ValueError, match=r"layers.\d carry no gradient.*use_reentrant=False"):
        mode.auxiliary_loss(records)
    with torch.no_grad():
        assert mode.auxiliary_loss(records) > 0


def test_frozen_routers_have_losses_without_gradient_and_no_error() -> None:
    model = build(None)
    model.requires_grad_(False)
    with mode.collect_routing(model) as records:
        model(tokens())
    assert not mode.auxiliary_loss(records).requires_grad


def test_nothing_collected_is_an_error_and_evaluation_has_no_losses() -> None:
    model = build(None)
    with mode.collect_routing(model) as records:
        pass
    with pytest.raises(ValueError, match="records are empty"):
        mode.auxiliary_loss(records)
    with mode.collect_routing(model.eval()) as records:
        model(tokens())
    assert len(records) == 2 and mode.auxiliary_loss(records) == 0


def test_collectors_may_be_nested_and_see_the_layers_of_their_own_model_only() -> None:
    model, other = build(None), build(None, None)
    with mode.collect_routing(model) as outer:
        model(tokens())
        with mode.collect_routing(model) as inner, mode.collect_routing(other) as others:
            model(tokens())
            other(tokens())
        with mode.collect_routing(model.layers[0]) as part:
            model(tokens())
    model(tokens())
    assert [len(each) for each in (outer, inner, others, part)] == [6, 2, 3, 1]
    assert part[0].name == "" and part[0].layer is model.layers[0]
    assert {id(record.layer) for record in others}.isdisjoint({id(record.layer) for record in outer})


def test_a_model_compiled_before_is_collected_from() -> None:
    torch._dynamo.reset()
    model = build(None)
    compiled = torch.compile(model, backend="eager")
    compiled(tokens())
    for asked in (compiled, model):
        with mode.collect_routing(asked) as records:
            output = compiled(tokens())
        assert [record.name for record in records] == ["layers.0", "depth"]
        torch.testing.assert_close(output, model(tokens()), rtol=0, atol=1e-12)
        assert mode.auxiliary_loss(records).requires_grad


class Holding(nn.Module):
    """Calls a part of itself `module`, as wrappers do, and has a layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.moe = build(None), mode.MoE(D, expert_width=6, **SETTINGS).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.module(x))[0]


def test_an_attribute_called_module_is_not_taken_for_the_model() -> None:
    model = Holding()
    with mode.collect_routing(nn.DataParallel(model)) as records:
        model(tokens())
    assert [record.name for record in records] == ["module.layers.0", "module.depth", "moe"]
    mode.after_step(model, records)
    assert model.moe.router.bias_J.any() and model.module.layers[0].router.bias_J.any()


def test_a_step_of_several_passes_moves_a_bias_once_by_all_of_them() -> None:
    model, expected = build(None), build(None)
    passes = []
    for part in tokens():
        with mode.collect_routing(model) as records:
            model(part.unsqueeze(0))
        passes.append(records)
    mode.after_step(model, passes)
    with mode.collect_routing(expected) as records:
        expected(tokens())
    mode.after_step(expected, records)
    bias = model.layers[0].router.bias_J
    assert torch.equal(bias, expected.layers[0].router.bias_J) and 0 < bias.abs().max() <= 0.1 + 1e-6


def test_records_of_another_model_move_no_bias() -> None:
    model, other = build(None), build(None)
    with mode.collect_routing(other) as records:
        other(tokens())
    for wrong in (records, []):
        with pytest.raises(ValueError, match="no choice of this model's layers"):
            mode.after_step(model, wrong)
    assert not model.layers[0].router.bias_J.any()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What lives is what is referred to, not what the collector has not reached yet."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_of_a_pass_lives_on_without_its_records(without_collector: None) -> None:
    model = OwnModel(**EXPERTS)
    made: list[weakref.ref[Any]] = []
    for module in model.modules():
        if isinstance(module, mode.MoE | mode.DepthRouted):
            module.router.register_forward_hook(
                lambda _, __, out: made.append(weakref.ref(out[0] if isinstance(out, tuple) else out))
            )
    with mode.collect_routing(model) as records:
        loss = model(batches(0))
    (loss + mode.auxiliary_loss(records)).backward()
    mode.after_step(model, records)
    assert len(made) == len(records) == 3 and all(ref() is not None for ref in made)
    del records, loss
    assert not any(ref() for ref in made), "the records were dropped"
    made.clear()
    loss = model(batches(0))
    assert len(made) == 3 and not any(ref() for ref in made), "no record was asked for, though backward is to come"
    loss.backward()


# ---- Costs ----


class Biased(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, 10), nn.GELU(), nn.Linear(10, D))


class Residual(nn.Module):
    """A block with experts and nothing else that has FLOPs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.moe = mode.MoE(D, **{"num_experts": 4, "k": 2, "layer": 1} | settings)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return x + self.moe(x)[0]


LAYERS: dict[str, dict[str, Any]] = {
    "fast experts": {"expert_width": 6},
    "experts by loops": {"expert_width": 6, "backend": "loop"},
    "no-ops and shared experts": {"expert_width": 6, "num_shared": 2, "num_no_ops": 2, "no_op_fraction": 0.25},
    "experts of any module": {"expert": Biased()},
    "dropped choices": {"expert_width": 6, "capacity_factor": 0.5},
    "one choice": {"expert": Biased(), "k": 1},
}
DEPTHS: dict[str, dict[str, Any]] = {
    "learned": {},
    "predictor": {"predictor_width": 5},
    "stochastic": {"selection": "stochastic", "gate": "one"},
    "token choice": {"selection": "token_choice", "gate": "sigmoid"},
}


def counted_and_formula(model: nn.Module, *arguments: Any) -> tuple[list[LayerCosts], Flops, Flops]:
    x = tokens().float().requires_grad_()
    outputs = []

    def forward() -> None:
        with mode.collect_routing(model) as records:
            out = model(x, *arguments)
        outputs.extend([records, (out[0] if isinstance(out, tuple) else out).square().sum()])

    forward_flops = counted(forward)
    records, loss = outputs
    backward_flops = counted((loss + mode.auxiliary_loss(records)).backward)
    costs = mode.routing_costs(records)
    return costs, Flops(forward_flops, backward_flops), sum((each.total_flops for each in costs), Flops())


@pytest.mark.parametrize("name", LAYERS)
def test_costs_of_an_expert_layer_equal_counted_flops_and_choices(name: str) -> None:
    layer = spread_weights(mode.MoE(D, **{"num_experts": 4, "k": 2} | LAYERS[name]))
    (costs,), flops, formula = counted_and_formula(layer)
    assert flops == formula and flops.forward > 0
    assert costs.tokens == costs.kept == 12
    assert costs.real + costs.no_op + costs.dropped == 12 * layer.config.top_k
    assert (costs.no_op > 0) == ("no-ops" in name) and (costs.dropped > 0) == ("dropped" in name)
    assert costs.all_to_all_bytes == 0, "all experts are on this rank"


@pytest.mark.parametrize("depth", DEPTHS)
def test_costs_of_a_depth_routed_block_equal_counted_flops(depth: str) -> None:
    block = Residual(**LAYERS["no-ops and shared experts"])
    model = spread_weights(mode.DepthRouted(block, D, 0.5, layer=3, **DEPTHS[depth]))
    costs, flops, formula = counted_and_formula(model)
    experts, router = costs  # the block's layers end before the block does
    assert flops == formula
    assert (router.name, experts.name) == ("", "block.moe")
    assert router.tokens == 12 and router.kept == experts.tokens <= 6
    parts = {"learned": ["depth_router"], "predictor": ["depth_router", "predictor"], "stochastic": []}
    assert list(router.flops) == parts.get(depth, ["depth_router"])


def test_padding_is_scored_but_is_no_token() -> None:
    model = spread_weights(mode.DepthRouted(Residual(expert_width=6), D, 0.5, layer=3))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    costs, flops, formula = counted_and_formula(model, mask)
    experts, router = costs
    assert (router.tokens, router.kept, experts.tokens) == (8, 5, 5)
    assert flops == formula


def test_costs_of_our_transformer_are_those_of_its_accounting() -> None:
    experts = {"num_no_ops": 2, "no_op_fraction": 0.25, "num_shared": 1, "capacity_factor": 0.7}
    config = make_config(experts=experts, depth={"predictor": {"width": 5}})
    model = ModeTransformer(config)
    ids = torch.randint(40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with mode.collect_routing(model) as records:
        out = model(ids)
    parts: dict[str, Flops] = {}
    for costs in mode.routing_costs(records):
        for part, flops in costs.flops.items():
            parts[part] = parts.get(part, Flops()) + flops
    expected = accounting.model_flops_by_part(config, [record.counts() for record in out.routing])
    dense = {"attention_projections", "attention_scores", "head"}
    assert parts == {part: flops for part, flops in expected.items() if part not in dense}
    real = [costs.real for costs in mode.routing_costs(records) if "experts" in costs.flops]
    assert real == [record.counts().processed for record in out.routing]


def test_counts_that_lost_an_assignment_are_refused() -> None:
    sizes = {"width": D, "num_columns": 4, "expert_weights": 10, "shared_weights": 0, "element_size": 4, "ep_size": 2}
    costs = accounting.expert_layer_costs("x", tokens=5, top_k=2, processed=7, no_op=2, dropped=1, **sizes)
    assert costs.all_to_all_bytes == 7 * D * 4
    with pytest.raises(ValueError, match="7 processed.* 5 tokens make 10"):
        accounting.expert_layer_costs("x", tokens=5, top_k=2, processed=7, no_op=2, dropped=0, **sizes)
    with pytest.raises(ValueError, match="6 kept of 5 tokens"):
        accounting.depth_layer_costs("x", tokens=5, slots=8, kept=6, width=D, has_scorer=True, predictor_width=0)
