"""The expert layer against nested loops, for all backends of a CPU and every edge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from mode.accounting import expert_capacity
from mode.layers import Initial, SwiGLU
from mode.moe.layer import LocalMoE
from mode.moe.router import within_capacity
from mode.ops.operators import largest_columns
from mode.ops.rows import Rows, gather_rows, inverse, sum_rows
from mode.records import collect_routing
from tests import reference
from tests.helpers import assert_same_with_gradients, make_config, needs_kernels, spread_weights

BACKENDS = {  # grouped_mm knows no float64
    "loop": (torch.float64, 1e-10),
    "native": (torch.float64, 1e-10),
    "grouped_mm": (torch.float32, 2e-5),
}
EACH_BACKEND = [pytest.param(name, marks=needs_kernels if name == "native" else ()) for name in BACKENDS]


@pytest.fixture(autouse=True, scope="module")
def two_cores():
    """Or "native" would have but one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_layer(config, dtype, seed=0):
    return spread_weights(LocalMoE(config.model.width, config=config.experts).to(dtype), seed)


def route(layer, x_TD):
    return layer.router(x_TD, (1, len(x_TD)))


def tokens(num_tokens, dtype, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def assert_matches_reference(config, layer, x_TD, tolerance):
    with collect_routing(layer) as records:
        actual = layer(x_TD)[0]
    expected = reference.moe(layer, config, list(x_TD))
    expected = torch.stack(expected) if expected else x_TD * 0
    assert_same_with_gradients(actual, expected, {"x": x_TD, **dict(layer.named_parameters())}, tolerance)
    return records[0].routing


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("no_ops", [0, 1, 3])
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_layer_equals_nested_loops_in_outputs_and_every_gradient(backend, no_ops, top_k, num_tokens):
    dtype, tolerance = BACKENDS[backend]
    share = {0: 0.0, 1: 0.2, 3: 0.5}[no_ops]
    config = make_config(experts={"backend": backend, "num_no_ops": no_ops, "no_op_fraction": share, "top_k": top_k})
    routing = assert_matches_reference(config, make_layer(config, dtype), tokens(num_tokens, dtype), tolerance)
    assert routing.num_processed() + routing.num_no_op() == num_tokens * top_k


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize(
    "change",
    [
        {"capacity_factor": 0.5},
        {"capacity_factor": 1.0, "num_no_ops": 2, "no_op_fraction": 0.5},
        {"renormalize": True, "num_no_ops": 1, "no_op_fraction": 0.25},
        {"num_shared": 2},
        {"balance_bias": {"rate": 0.1}, "num_no_ops": 1, "no_op_fraction": 0.25},
        {"num_experts": 1, "top_k": 1},
        {"num_experts": 1, "top_k": 2, "num_no_ops": 1, "no_op_fraction": 0.5},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_option_equals_nested_loops(backend, change):
    dtype, tolerance = BACKENDS[backend]
    config = make_config(experts={"backend": backend, **change})
    layer = make_layer(config, dtype)
    if config.experts.balance_bias is not None:
        layer.router.bias_J.copy_(torch.tensor([0.5, -1.0, 0.0, 2.0, 1.0]))
    assert_matches_reference(config, layer, tokens(13, dtype), tolerance)


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_all_no_op_gives_exactly_zero_and_zero_gradients(backend):
    dtype, tolerance = BACKENDS[backend]
    config = make_config(
        experts={"backend": backend, "top_k": 1, "num_no_ops": 1, "no_op_fraction": 0.5, "balance_bias": {}}
    )
    layer = make_layer(config, dtype)
    layer.router.bias_J[-1] = 1e4
    routing = assert_matches_reference(config, layer, tokens(6, dtype), tolerance)
    assert routing.num_no_op() == 6 and routing.num_processed() == 0
    out = layer(tokens(6, dtype))[0]
    assert not out.any()
    out.square().sum().backward()
    assert all(not parameter.grad.any() for parameter in layer.experts.parameters())


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_an_expert_with_no_token_gets_a_zero_gradient_and_the_others_the_right_one(backend):
    dtype, tolerance = BACKENDS[backend]
    config = make_config(experts={"backend": backend, "balance_bias": {}})
    layer = make_layer(config, dtype)
    layer.router.bias_J[2] = -1e4
    routing = assert_matches_reference(config, layer, tokens(9, dtype), tolerance)
    assert routing.processed_counts_E()[2] == 0
    layer(tokens(9, dtype))[0].square().sum().backward()
    assert not layer.experts.w1.grad[2].any() and layer.experts.w1.grad[1].any()


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_one_expert_and_no_no_ops_equals_the_dense_feed_forward(backend):
    dtype, tolerance = BACKENDS[backend]
    config = make_config(experts={"backend": backend, "num_experts": 1, "top_k": 1})
    layer, dense = make_layer(config, dtype), SwiGLU(16, 24, Initial(0, "dense")).to(dtype)
    for name in ("w1", "w2", "w3"):
        getattr(dense, name).weight.data.copy_(getattr(layer.experts, name)[0])
    x_TD = tokens(7, dtype)
    torch.testing.assert_close(layer(x_TD)[0], dense(x_TD), rtol=tolerance, atol=tolerance)


def test_no_ops_own_no_parameters_but_their_router_row():
    plain = make_layer(make_config(experts={}), torch.float32)
    with_no_ops = make_layer(make_config(experts={"num_no_ops": 3, "no_op_fraction": 0.5}), torch.float32)
    sizes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    grown = {name: parameter.shape for name, parameter in with_no_ops.named_parameters()}
    assert sizes.pop("router.scorer.weight") == (4, 16) and grown.pop("router.scorer.weight") == (7, 16)
    assert sizes == grown


def test_no_op_and_dropped_choices_are_in_no_dispatch():
    config = make_config(experts={"num_no_ops": 2, "no_op_fraction": 0.5, "capacity_factor": 0.5})
    layer, x_TD = make_layer(config, torch.float64), tokens(30, torch.float64)
    routing = route(layer, x_TD)
    sent = layer.experts.dispatcher.dispatch(x_TD, routing)
    assert routing.num_no_op() > 0 and routing.num_dropped() > 0
    assert len(sent.x_QD) == sent.counts_e.sum() == routing.num_processed()
    assert routing.num_processed() + routing.num_no_op() + routing.num_dropped() == 30 * 2
    assert torch.equal(sent.counts_e, routing.processed_counts_E())


def test_evaluation_is_dropless_and_twice_bit_equal():
    config = make_config(experts={"capacity_factor": 0.25})
    layer, x_TD = make_layer(config, torch.float32), tokens(20, torch.float32)
    assert route(layer, x_TD).num_dropped() > 0
    layer.eval()
    assert route(layer, x_TD).num_dropped() == 0
    assert torch.equal(layer(x_TD)[0], layer(x_TD)[0])


def test_router_stays_in_float32_in_a_bfloat16_model():
    config = make_config(experts={"num_no_ops": 1, "no_op_fraction": 0.25, "balance_bias": {}})
    layer = make_layer(config, torch.bfloat16)
    x_TD = tokens(8, torch.bfloat16)
    out, routing = layer(x_TD)[0], route(layer, x_TD)
    assert out.dtype == torch.bfloat16
    assert routing.logits_TJ.dtype == routing.gates_TK.dtype == layer.router.bias_J.dtype == torch.float32


def test_the_selection_bias_keeps_its_value_through_a_change_of_precision():
    config = make_config(experts={"balance_bias": {}})
    layer = make_layer(config, torch.float32)
    layer.router.bias_J.copy_(torch.tensor([1.001, 2.002, -3.003, 4.004]))
    expected = layer.router.bias_J.clone()
    layer.bfloat16()
    assert torch.equal(layer.router.bias_J, expected)
    assert torch.equal(layer.state_dict()["router.bias_J"], expected)


def test_the_selection_bias_changes_choices_but_neither_scores_nor_gradients():
    config = make_config(experts={"balance_bias": {}, "top_k": 1})
    layer, x_TD = make_layer(config, torch.float64), tokens(8, torch.float64)
    before = route(layer, x_TD)
    layer.router.bias_J[1] = 100.0
    after = route(layer, x_TD)
    assert (after.choices_TK == 1).all() and not (before.choices_TK == 1).all()
    assert torch.equal(before.scores_TJ, after.scores_TJ)
    assert torch.equal(after.gates_TK, after.scores_TJ[:, 1:2])


def test_the_bias_moves_toward_the_targets():
    config = make_config(experts={"num_no_ops": 2, "no_op_fraction": 0.5, "balance_bias": {"rate": 0.1}})
    router = make_layer(config, torch.float32).router
    router.move_bias(torch.tensor([100, 100, 0, 200, 300, 100]))  # shares 1/8, 1/8, 0, 1/4 | no-op 1/2
    torch.testing.assert_close(router.bias_J, torch.tensor([0.0, 0.0, 0.1, -0.1, 0.0, 0.0]))
    router.move_bias(torch.tensor([0, 0, 0, 0, 5, 5]))  # all no-op: both columns fall alike
    torch.testing.assert_close(router.bias_J, torch.tensor([0.1, 0.1, 0.2, 0.0, -0.1, -0.1]))


def test_inputs_are_not_changed_in_place():
    config = make_config(experts={})
    layer, x_TD = make_layer(config, torch.float64), tokens(8, torch.float64)
    before = x_TD.detach().clone()
    layer(x_TD)
    assert torch.equal(x_TD.detach(), before)


@given(st.lists(st.lists(st.integers(-1, 1), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 5))
def test_the_largest_columns_are_distinct_and_the_lower_of_equals_comes_first(rows, top_k):
    expected = [sorted(range(5), key=lambda j: (-row[j], j))[:top_k] for row in rows]
    assert largest_columns(torch.tensor(rows, dtype=torch.float32), top_k).tolist() == expected


@settings(max_examples=200)
@given(st.data())
def test_capacity_drops_the_lowest_gates_and_of_equals_the_later_token(data):
    num_tokens, capacity = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 6))
    choices = [data.draw(st.permutations(range(4)))[:2] for _ in range(num_tokens)]
    gates = [[data.draw(st.integers(0, 3)) for _ in range(2)] for _ in range(num_tokens)]
    inside = within_capacity(
        torch.tensor(choices, dtype=torch.int64).view(-1, 2),
        torch.tensor(gates, dtype=torch.float32).view(-1, 2),
        4,
        capacity,
    ).tolist()
    for column in range(4):
        wanting = sorted((-gates[t][k], t, k) for t in range(num_tokens) for k in range(2) if choices[t][k] == column)
        for place, (_, t, k) in enumerate(wanting):
            assert inside[t][k] == (place < capacity)


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    top_k=st.integers(1, 3),
    no_ops=st.integers(0, 2),
    factor=st.sampled_from([None, 0.25, 0.5, 1.0, 1.25]),
    seed=st.integers(0, 1000),
)
def test_every_choice_is_processed_or_no_op_or_dropped(num_tokens, top_k, no_ops, factor, seed):
    share = 0.3 if no_ops else 0.0
    config = make_config(
        experts={"top_k": top_k, "num_no_ops": no_ops, "no_op_fraction": share, "capacity_factor": factor}
    )
    routing = route(make_layer(config, torch.float32, seed), tokens(num_tokens, torch.float32, seed))
    processed, no_op, dropped = int(routing.num_processed()), int(routing.num_no_op()), int(routing.num_dropped())
    assert processed + no_op + dropped == num_tokens * top_k
    assert int(routing.choice_counts_J().sum()) == num_tokens * top_k
    assert int(routing.processed_counts_E().sum()) == processed
    if factor is not None:
        limit = expert_capacity(factor, top_k, num_tokens, share, 4)
        assert int(routing.processed_counts_E().max()) <= limit
        assert dropped == int((routing.choice_counts_J()[:4] - limit).clamp(min=0).sum())
    else:
        assert dropped == 0


def test_a_tokens_rows_in_bfloat16_are_summed_before_they_are_rounded() -> None:
    """Forward and backward: torch's own sum of bfloat16 rows is not."""
    generator = torch.Generator().manual_seed(0)
    x_RD = (4 * torch.randn(60, 16, generator=generator)).bfloat16()
    order_R = torch.randperm(60, generator=generator)
    placed_R = inverse(order_R)
    rows = Rows(placed_R, placed_R // 3, rows_R=order_R, starts_T=torch.arange(0, 60, 3), counts_E=torch.tensor([60]))
    expected_TD = x_RD[order_R].float().view(20, 3, 16).sum(dim=1).bfloat16()
    assert torch.equal(sum_rows(x_RD, torch.ones(60), rows), expected_TD)
    x_TD = torch.zeros(20, 16, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x_TD, rows).backward(x_RD)
    assert torch.equal(x_TD.grad, expected_TD)


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_without_no_ops_and_capacity_nothing_waits_for_the_device_to_learn_how_many_rows_there_are(
    bfloat16_by_default,  # what torch's grouped product takes where there are no values
):
    """Fake tensors have shapes and no values: what needs a value to go on, as one that waits for a device, fails."""
    config = make_config(experts={"num_no_ops": 0, "no_op_fraction": 0.0, "top_k": 2, "backend": "grouped_mm"})
    with_no_ops = make_config(experts={"num_no_ops": 2, "no_op_fraction": 0.5, "backend": "grouped_mm"})
    with FakeTensorMode():
        x_TD = torch.randn(12, config.model.width, requires_grad=True)
        layer = LocalMoE(config.model.width, config=config.experts)
        out_TD = layer(x_TD)[0]
        out_TD.sum().backward()
        assert x_TD.grad.shape == x_TD.shape and layer.experts.w1.grad.shape == layer.experts.w1.shape
        with pytest.raises(DynamicOutputShapeException):  # how many are no-ops only the device knows
            LocalMoE(config.model.width, config=with_no_ops.experts)(x_TD)
