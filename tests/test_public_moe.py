"""The expert layer that anyone can put into a model: equal to loops over tokens, and plain about what it refuses."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from torch import Tensor, nn

import mode
from mode.config.settings import ExpertsConfig
from mode.moe import router as routers
from mode.moe.layer import NOT_HERE, LocalMoE
from tests.helpers import assert_same_with_gradients, spread_weights

D, F, E, Z, K = 8, 6, 4, 2, 2
NO_OPS: dict[str, Any] = {"num_no_ops": Z, "no_op_fraction": 0.25, "bias_rate": 0.1}


class GatedExpert(nn.Module):
    """A SwiGLU as anyone would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*widths, bias=False) for widths in ((D, F), (F, D), (D, F)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def biased_expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))


def by_loops(layer: LocalMoE, expert: nn.Module, x: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor, list]:
    """(output, l_aux, expert_counts) of a dropless layer whose experts are copies of `expert`: token by token."""
    config, router = layer.config, layer.router
    columns, target = config.num_experts + config.num_no_ops, 1 - config.no_op_fraction
    bias = [0.0] * columns if router.bias_J is None else router.bias_J.tolist()
    sequences = x.reshape(-1, x.shape[-2] if x.ndim > 1 else 1, D) if x.numel() else []
    kept = [[True] * len(row) for row in sequences] if used is None else used.reshape(len(sequences), -1).tolist()
    shapes = {name: parameter.shape for name, parameter in expert.named_parameters()}
    outputs, balances, squares, counts = [], [], [], [0] * config.num_experts
    for row, mask in zip(sequences, kept, strict=True):
        chosen, score_sums, partition, tokens = [0.0] * columns, [0.0] * columns, 0.0, max(1, sum(mask))
        for token, is_used in zip(row, mask, strict=True):
            out = torch.zeros_like(token)
            if is_used:
                logits = [(weight * token).sum() for weight in router.scorer.weight]
                total = sum(torch.exp(logit) for logit in logits)
                scores = [torch.exp(logit) / total for logit in logits]
                picked = sorted(range(columns), key=lambda j: (-(logits[j].item() + bias[j]), j))[: config.top_k]
                whole = sum(scores[j] for j in picked) if config.renormalize else 1.0
                for j in picked:
                    chosen[j] += 1 / config.top_k
                    if j < config.num_experts:
                        counts[j] += 1
                        flat = torch.cat([part[j].flatten() for part in layer.experts.parameters()])
                        sizes = [shape.numel() for shape in shapes.values()]
                        parts = flat[: sum(sizes)].split(sizes)
                        weights = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
                        out = out + scores[j] / whole * torch.func.functional_call(expert, weights, (token,))
                score_sums = [a + b for a, b in zip(score_sums, scores, strict=True)]
                partition = partition + torch.log(total) ** 2
            outputs.append(out)
        real = [chosen[j] / tokens * score_sums[j] / tokens / (target / E) for j in range(config.num_experts)]
        idle_f, idle_p = (sum(each[config.num_experts :]) / tokens for each in (chosen, score_sums))
        idle = idle_f * idle_p / config.no_op_fraction if config.num_no_ops else 0.0
        balances.append(sum(real) + idle)
        squares.append(partition / tokens)
    output = torch.stack(outputs).view_as(x) if outputs else x * 0
    weight = 0.0 if config.balance_loss is None else config.balance_loss.weight
    l_aux = torch.zeros((), dtype=torch.float64)
    if balances:
        l_aux = l_aux + weight * sum(balances) / len(balances) + config.z_loss_weight * sum(squares) / len(squares)
    return output, l_aux, counts


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.6


# name -> (leading shape, settings, selection bias, mask)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], list[float] | None, Tensor | None]] = {
    "one vector": ((), {}, None, None),
    "tokens": ((7,), {}, None, None),
    "rows of tokens": ((3, 5), NO_OPS, None, None),
    "four axes": ((2, 1, 3), NO_OPS, None, None),
    "no token": ((0,), NO_OPS, None, None),
    "rows without tokens": ((3, 0), NO_OPS, None, None),
    "no rows": ((0, 5), NO_OPS, None, None),
    "one token": ((1, 1), NO_OPS, None, None),
    "all no-op": ((2, 4), NO_OPS, [-99.0] * E + [0.0] * Z, None),
    "an expert with no token": ((2, 4), NO_OPS, [0.0, -99.0, 0.0, 0.0, 0.0, 0.0], None),
    "one choice, not renormalised": ((6,), {"k": 1}, None, None),
    "two choices, not renormalised": ((6,), {"renormalize": False}, None, None),
    "every column chosen": ((3,), {"k": E}, None, None),
    "unused tokens": ((3, 4), NO_OPS, None, mask(3, 4)),
    "unused tokens of a flat list": ((9,), {}, None, mask(9)),
    "a row without used tokens": ((2, 3), {}, None, torch.tensor([[True, False, True], [False] * 3])),
    "no used token": ((2, 3), NO_OPS, None, torch.zeros(2, 3, dtype=torch.bool)),
}
LOSSES: dict[str, Any] = {"balance_weight": 0.7, "z_loss_weight": 0.3}


def build(kind: str, settings: dict[str, Any], bias: list[float] | None = None) -> tuple[mode.MoE, nn.Module]:
    """The layer in float64, and one of its experts."""
    experts: dict[str, nn.Module] = {"width": GatedExpert(), "gated": GatedExpert(), "biased": biased_expert()}
    kinds = {"expert_width": F} if kind == "width" else {"expert": experts[kind]}
    layer = mode.MoE(D, num_experts=E, **{"k": K} | kinds | LOSSES | settings)
    spread_weights(layer.double(), scale=0.5)
    if bias is not None:
        assert layer.router.bias_J is not None
        layer.router.bias_J.copy_(torch.tensor(bias))
    return layer, experts[kind].double()


@pytest.mark.parametrize("kind", ("width", "gated", "biased"))
@pytest.mark.parametrize("case", CASES)
def test_a_layer_equals_loops_over_tokens_in_outputs_losses_counts_and_all_gradients(case: str, kind: str) -> None:
    shape, settings, bias, used = CASES[case]
    layer, expert = build(kind, settings, bias)
    x = tokens(*shape)
    output, l_aux, counts = layer(x, used)
    expected, expected_aux, expected_counts = by_loops(layer, expert, x, used)
    assert output.shape == x.shape and counts.tolist() == expected_counts
    actual, expected = (torch.cat([o.flatten(), a.view(1)]) for o, a in ((output, l_aux), (expected, expected_aux)))
    if not actual.requires_grad or not expected.requires_grad:  # loops over nothing depend on nothing
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        return
    assert_same_with_gradients(actual, expected, {"x": x, **dict(layer.named_parameters())}, 1e-10)


def test_equal_scores_choose_the_first_columns() -> None:
    layer, expert = build("biased", {})
    with torch.no_grad():
        layer.router.scorer.weight[1:] = layer.router.scorer.weight[0]
    x = tokens(5)
    output, _, counts = layer(x)
    assert counts.tolist() == [5, 5, 0, 0]
    torch.testing.assert_close(output, by_loops(layer, expert, x)[0], rtol=0, atol=1e-12)


def test_the_two_kinds_of_experts_with_equal_weights_are_one_layer() -> None:
    fast, _ = build("width", NO_OPS)
    plain, _ = build("gated", NO_OPS)
    with torch.no_grad():
        plain.router.scorer.weight.copy_(fast.router.scorer.weight)
        for name in ("w1", "w2", "w3"):
            plain.experts.get_parameter(name).copy_(fast.experts.get_parameter(name).flatten(1).unsqueeze(1))
    x = tokens(3, 5)
    outputs = [torch.cat([out.flatten(), aux.view(1)]) for out, aux, _ in (layer(x) for layer in (fast, plain))]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    direction = torch.randn(len(outputs[0]), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = []
    for layer, out in zip((fast, plain), outputs, strict=True):
        parameters = [x, *(parameter for _, parameter in sorted(layer.named_parameters()))]
        grads.append([g.flatten() for g in torch.autograd.grad((out * direction).sum(), parameters)])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_unused_tokens_have_no_gradient_and_count_nowhere() -> None:
    layer, _ = build("width", NO_OPS)
    x, used = tokens(3, 4), mask(4, 3).t()  # not contiguous
    with mode.collect_routing(layer) as records:
        output, l_aux, counts = layer(x, used)
    (output.square().sum() + l_aux).backward()
    assert x.grad is not None and not x.grad[~used].any() and x.grad[used].any(dim=-1).all()
    assert not output[~used].any()
    routing = records[0].routing
    assert len(routing.choices_TK) == int(used.sum())
    assert int(counts.sum()) + int(routing.num_no_op()) == K * int(used.sum())
    for dtype in (torch.int64, torch.float32):
        assert torch.equal(layer(x, used.to(dtype))[0], output)


# ---- Arguments ----


def test_the_first_positions_and_names_are_deepspeeds() -> None:
    theirs = list(inspect.signature(DeepSpeedMoE.__init__).parameters)
    ours = list(inspect.signature(LocalMoE.__init__).parameters)
    assert theirs[:7] == ours[:7] == ["self", "hidden_size", "expert", "num_experts", "ep_size", "k", "capacity_factor"]
    assert set(theirs[7:]) == set(NOT_HERE), "every argument of DeepSpeed's is taken or refused by name"
    assert list(inspect.signature(DeepSpeedMoE.forward).parameters) == list(
        inspect.signature(LocalMoE.forward).parameters
    )
    layer = mode.MoE(D, biased_expert(), 4, 1, 2, 1.25)
    assert (layer.num_experts, layer.ep_size, layer.top_k, layer.config.capacity_factor) == (4, 1, 2, 1.25)


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_means_nothing_here_is_refused_by_name_with_what_to_use_instead(name: str) -> None:
    neutral, instead = NOT_HERE[name]
    mode.MoE(D, biased_expert(), **{name: neutral})
    value = {"noisy_gate_policy": "RSample", "min_capacity": 4, "eval_capacity_factor": 2.0}.get(name, True)
    with pytest.raises(ValueError, match=name) as error:
        mode.MoE(D, biased_expert(), **{name: value})
    assert repr(value) in str(error.value) and instead in str(error.value)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="num_expert'"):
        mode.MoE(D, biased_expert(), num_expert=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ("neither", "expert", "expert_width")),
        ({"expert": biased_expert(), "expert_width": 4}, ("both", "expert", "expert_width")),
        ({"expert": biased_expert(), "num_shared": 1}, ("num_shared", "expert_width")),
        ({"expert": biased_expert(), "backend": "loop"}, ("backend", "leave it out")),
        ({"expert": nn.ReLU()}, ("no parameters",)),
        ({"expert": nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))}, ("buffer '1.running_mean'", "persistent")),
        ({"expert": nn.Linear(D, D).requires_grad_(False)}, ("frozen", "'weight'")),
        ({"expert_width": 0}, ("expert_width", "is 0", "at least 1")),
        ({"expert_width": 4, "num_experts": 0}, ("num_experts", "is 0", "at least 1")),
        ({"expert_width": 4, "num_experts": 4, "k": 5}, ("k: is 5", "at most")),
        ({"expert_width": 4, "num_experts": 4, "k": 0}, ("k: is 0", "at least 1")),
        ({"expert_width": 4, "capacity_factor": -1.0}, ("capacity_factor", "-1.0", "above 0")),
        ({"expert_width": 4, "num_no_ops": 1}, ("no_op_fraction", "both")),
        ({"expert_width": 4, "balance_weight": -1.0}, ("balance_weight", "-1.0", "above 0")),
        ({"expert_width": 4, "balance_scope": "batch"}, ("balance_scope", "batch", "global")),
        ({"expert_width": 4, "bias_rate": 0.0}, ("bias_rate", "above 0")),
        ({"expert_width": 4, "backend": "cuda"}, ("backend", "cuda", "grouped_mm")),
        ({"expert_width": 4, "renormalize": True}, ("renormalize", "false")),
        ({"expert_width": 4, "num_experts": 4, "ep_size": 3}, ("ep_size", "3", "divisor")),
        ({"expert_width": 4, "num_experts": 4, "ep_size": 2}, ("ep_size", "1 ranks", "divisor")),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_the_setting_and_what_is_legal(settings: dict[str, Any], words: tuple) -> None:
    with pytest.raises(ValueError) as error:
        mode.MoE(D, **settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_input_of_another_width_or_a_mask_of_another_length_is_refused() -> None:
    layer, _ = build("width", {})
    with pytest.raises(ValueError, match=r"hidden_states has shape \(3, 5\); it must be \[..., 8\]"):
        layer(torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"used_token has shape \(2,\).* 3 tokens"):
        layer(tokens(3), torch.ones(2))


def test_a_layer_from_a_configuration_is_the_layer_from_its_arguments() -> None:
    config = ExpertsConfig(num_experts=E, top_k=K, width=F, renormalize=True, num_no_ops=Z, no_op_fraction=0.25)
    a = mode.MoE(D, config=config, seed=3, layer=7)
    b = mode.MoE(
        D, num_experts=E, k=K, expert_width=F, num_no_ops=Z, no_op_fraction=0.25, balance_weight=0, seed=3, layer=7
    )
    assert a.config == b.config
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_layers_made_without_a_number_begin_differently_and_with_one_alike() -> None:
    made = [mode.MoE(D, num_experts=E, expert_width=F) for _ in range(2)]
    again = [mode.MoE(D, num_experts=E, expert_width=F, layer=3) for _ in range(2)]
    assert not torch.equal(made[0].experts.w1, made[1].experts.w1)
    assert torch.equal(again[0].experts.w1, again[1].experts.w1)


# ---- Copies, and torch's tools ----


class SharingExpert(nn.Module):
    """Uses one weight twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.second(torch.tanh(self.first(x))), "more than x"


def test_an_expert_may_share_a_weight_and_return_a_tuple() -> None:
    expert = SharingExpert().double()
    layer = mode.MoE(D, expert, 1).double()
    x = tokens(4)
    output = layer(x)[0]
    torch.testing.assert_close(output, expert(x)[0], rtol=0, atol=1e-12)
    output.sum().backward()
    expert(x)[0].sum().backward()
    ours = torch.cat([p.grad[0, 0] for p in layer.experts.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in expert.parameters()])
    torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=0, atol=1e-12)


def test_a_constant_of_an_expert_moves_with_the_layer() -> None:
    expert = nn.Linear(D, D)
    expert.register_buffer("constant", torch.ones(D), persistent=False)
    layer = mode.MoE(D, expert, 2).double()
    assert layer.experts.template[0].constant.dtype == torch.float64
    assert set(layer.state_dict()) == {"router.scorer.weight", "experts.w1", "experts.w2", "experts.w3"}


def through_torch_save(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(layer: nn.Module, *devices: str) -> nn.Module:
    empty = copy.deepcopy(layer)
    for device in devices:
        empty = empty.to_empty(device=device)
    empty.load_state_dict(layer.state_dict())
    return empty


def built_on_meta(layer: mode.MoE, kind: str) -> nn.Module:
    with torch.device("meta"):
        empty, _ = build(kind, NO_OPS)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    return empty


@pytest.mark.parametrize("kind", ("width", "biased"))
def test_copies_pickles_and_emptied_layers_compute_the_same(kind: str) -> None:
    layer, _ = build(kind, NO_OPS, [0.3, 0.0, -0.2, 0.0, 0.1, 0.0])
    x = tokens(3, 5)
    expected = layer(x)[0]
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        through_torch_save(layer),
        emptied(layer, "cpu"),
        emptied(layer, "meta", "cpu"),
        built_on_meta(layer, kind),
    ]
    for each in copies:
        assert torch.equal(each(x)[0], expected)
        assert each.router.bias_J.dtype == torch.float32 and torch.equal(each.router.bias_J, layer.router.bias_J)
    assert layer.bfloat16().router.bias_J.dtype == torch.float32


@pytest.mark.parametrize("kind", ("width", "biased"))
def test_torch_func_gives_the_gradients_of_autograd(kind: str) -> None:
    layer, _ = build(kind, NO_OPS)
    x = tokens(3, 5)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        output, l_aux, _ = torch.func.functional_call(layer, parameters, (x,))
        return output.square().sum() + l_aux

    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    found, found_x = torch.func.grad(loss, argnums=(0, 1))(parameters, x.detach())
    expected = torch.autograd.grad(loss(dict(layer.named_parameters()), x), [*layer.parameters(), x])
    for a, b in zip([*found.values(), found_x], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ("width", "biased"))
def test_a_compiled_layer_gives_the_same_and_is_not_compiled_again_at_every_step(kind: str) -> None:
    torch._dynamo.reset()
    layer, _ = build(kind, NO_OPS)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    graphs = []
    for step in range(5):
        x = tokens(3, 5).detach().add(step).requires_grad_()
        with mode.collect_routing(compiled) as records:
            output, l_aux, _ = compiled(x)
        expected, expected_aux, _ = layer(x)
        assert len(records) == 1
        torch.testing.assert_close(l_aux, expected_aux, rtol=1e-10, atol=1e-10)
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (output, expected)]
        for a, b in ((output, expected), gradients):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[2], graphs


def test_a_bias_that_is_never_moved_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "PASSES_BEFORE_A_WARNING", 3)
    layer, _ = build("width", NO_OPS)
    x = tokens(2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(8):
            layer(x)
        layer.eval()(x)
    assert len(seen) == 1 and "mode.after_step" in str(seen[0].message)
    moved, _ = build("width", NO_OPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            with mode.collect_routing(moved) as records:
                moved(x)
            mode.after_step(moved, records)
