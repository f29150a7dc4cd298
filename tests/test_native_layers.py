"""What lies between the products, in compiled code, against the same in torch: outputs and every gradient."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mode.ops import operators
from mode.ops.operators import can_use_kernels, largest, rotate_heads, route, score_and_take
from mode.transformer.attention import rope_tables
from mode.transformer.block import RMSNorm
from mode.transformer.losses import NO_LABEL, cross_entropy, token_losses
from tests.helpers import needs_kernels

pytestmark = needs_kernels
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(autouse=True, params=[1, 2], ids=["one core", "two cores"])
def cores(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@contextmanager
def in_torch():
    """No kernels, in backward neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "can_use_kernels", lambda *tensors: False)
        yield


def assert_same(function, leaves, tolerance):
    """Outputs, and the gradients of `leaves` for random gradients of the outputs."""
    found = []
    for way in (nullcontext, in_torch):
        with way():
            outputs = function(*leaves)
            differentiable = [each for each in outputs if each.requires_grad]
            grads = [random(*each.shape, dtype=each.dtype, seed=9) for each in differentiable]
            found.append([*outputs, *torch.autograd.grad(differentiable, leaves, grads)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 5, 24), (700, 33), (1, 1, 7), (0, 16), (2, 0, 16), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype, shape):
    norm = RMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data.copy_(random(shape[-1], seed=1))
    x_XD = random(*shape, dtype=dtype).requires_grad_()
    assert can_use_kernels(x_XD, norm.weight)
    assert_same(lambda x, weight: (norm(x),), [x_XD, norm.weight], DTYPES[dtype] * 10)
    torch.testing.assert_close(norm(x_XD), nn.RMSNorm.forward(norm, x_XD))


def test_rms_norm_of_a_part_of_wider_rows_and_of_zeros():
    norm = RMSNorm(8, eps=1e-5).double()
    wide = random(6, 20).requires_grad_()
    assert_same(lambda x, weight: (norm(x[:, 4:12]),), [wide, norm.weight], 1e-11)
    zeros = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    assert_same(lambda x, weight: (norm(x),), [zeros, norm.weight], 1e-11)


@pytest.mark.parametrize("head_width", [2, 16, 34])
@pytest.mark.parametrize("rows_share_tables", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_positions(dtype, rows_share_tables, head_width):
    positions = torch.arange(70).unsqueeze(0) if rows_share_tables else torch.arange(140).view(2, 70)
    cos, sin = (t.expand(2, -1, -1) for t in rope_tables(positions, head_width, 1e4, dtype))
    wide = random(2, 70, 9, head_width, dtype=dtype).requires_grad_()
    assert can_use_kernels(wide, cos, sin)
    for layout in (
        lambda x: x[:, :, 1:8],  # a part of wider tokens
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # a head's numbers lie apart
    ):
        for num_kv_heads in (1, 2, 3):
            assert_same(lambda x, put=layout, n=num_kv_heads: rotate_heads(put(x), cos, sin, n), [wide], DTYPES[dtype])


def test_rotary_positions_of_gradients_that_lie_as_attention_leaves_them():
    """Head by head instead of token by token; and no gradient at all of the keys."""
    cos, sin = rope_tables(torch.arange(10).unsqueeze(0), 8, 1e4, torch.float64)
    heads = random(1, 10, 4, 8).requires_grad_()

    def attended(x):
        q, k, v = rotate_heads(x, cos, sin, 1)
        return (
            F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k.expand_as(q), v.expand_as(q)))),
        )

    assert_same(attended, [heads], 1e-12)
    assert_same(lambda x: rotate_heads(x, cos, sin, 1)[0::2], [heads], 1e-12)


def route_logits(logits_TJ, bias_J, top_k):
    """By a router whose logits are its inputs."""
    return route(logits_TJ, nn.Parameter(torch.eye(logits_TJ.shape[1])), bias_J, top_k)[1:]


@pytest.mark.parametrize(("columns", "top_k"), [(1, 1), (3, 1), (3, 3), (9, 1), (9, 2), (16, 3), (40, 1), (40, 2)])
@pytest.mark.parametrize("tokens", [0, 1, 130, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expert_router(dtype, tokens, columns, top_k):
    x_TD = random(tokens, 13, dtype=dtype).requires_grad_()
    weight_JD = nn.Parameter(random(columns, 13, dtype=dtype, seed=3))
    bias_J = random(columns, dtype=torch.float32, seed=4)
    assert can_use_kernels(x_TD, weight_JD)
    for bias in (None, bias_J):
        assert_same(lambda x, weight, b=bias: route(x, weight, b, top_k), [x_TD, weight_JD], DTYPES[dtype] * 20)


@pytest.mark.parametrize("parts", [(0,), (1,), (3,), (0, 1), (0, 3), (0, 1, 3)], ids=str)
def test_an_expert_router_whose_outputs_are_used_in_part(parts):
    """Of: logits, scores, choices, gates."""
    x_TD, weight_JD = random(20, 6).requires_grad_(), nn.Parameter(random(9, 6, seed=3))

    def used(x, weight=weight_JD):
        outputs = route(x, weight, None, 2)
        return [outputs[part] for part in parts]

    assert_same(used, [x_TD, weight_JD], 1e-12)


def test_of_equal_columns_the_lower_is_chosen_first_and_infinite_ones_never_before_others():
    infinite = float("inf")
    logits_TJ = torch.tensor([[1.0, 2, 2, 1], [0, 0, 0, 0]])
    assert route_logits(logits_TJ, None, 3)[1].tolist() == [[1, 2, 0], [0, 1, 2]]
    bias_J = torch.tensor([-infinite, 3, -infinite, infinite])
    assert route_logits(torch.zeros(1, 4), bias_J, 3)[1].tolist() == [[3, 1, 0]]


def test_a_logit_that_is_no_number_makes_all_scores_of_its_token_none():
    x_TD = torch.tensor([[float("nan"), 1.0], [1.0, 0.0]])
    _, scores_TJ, choices_TK, _ = route(x_TD, nn.Parameter(torch.ones(3, 2)), None, 2)
    assert scores_TJ[0].isnan().all() and not scores_TJ[1].isnan().any()
    assert ((choices_TK >= 0) & (choices_TK < 3)).all()


@pytest.mark.parametrize("shape", [(2, 130, 24), (3, 300, 33), (1, 1, 7), (0, 4, 16), (2, 5, 1)], ids=str)
@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scoring_and_taking_tokens(dtype, kept, shape):
    x_BLD = random(*shape, dtype=dtype).requires_grad_()
    weight_1D = random(1, shape[-1], dtype=dtype, seed=1).requires_grad_()
    assert can_use_kernels(x_BLD, weight_1D)
    assert_same(lambda x, weight: score_and_take(x, weight, kept), [x_BLD, weight_1D], DTYPES[dtype] * 10)


@pytest.mark.parametrize("way", [nullcontext, in_torch], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scoring_and_taking_equals_plain_autograd_in_float64(dtype, way):
    """A thousand tokens; in bfloat16 the kernels are not used."""
    x_BLD, weight_1D = random(4, 250, 24, dtype=dtype), random(1, 24, dtype=dtype, seed=1)
    grads = [random(4, 250, dtype=torch.float32, seed=3), random(4, 30, 24, dtype=dtype, seed=4)]
    ours = [each.clone().requires_grad_() for each in (x_BLD, weight_1D)]
    exact = [each.double().requires_grad_() for each in (x_BLD, weight_1D)]
    with way():
        logits_BL, kept_BS, kept_BSD = score_and_take(*ours, 30)
        found = torch.autograd.grad([logits_BL, kept_BSD], ours, grads)
    plain_BL = (exact[0] @ exact[1].T).squeeze(-1)
    plain_BSD = exact[0].gather(1, kept_BS.unsqueeze(-1).expand(-1, -1, 24))
    expected = torch.autograd.grad([plain_BL, plain_BSD], exact, [each.double() for each in grads])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("used", [0, 2], ids=["logits", "kept"])
def test_scoring_and_taking_where_one_of_both_is_used_equals_plain_autograd(used):
    x_BLD, weight_1D = random(2, 9, 5).requires_grad_(), random(1, 5, seed=1).requires_grad_()
    grads = [random(2, 9, seed=3), None, random(2, 4, 5, seed=4)]
    scores_BL = x_BLD @ weight_1D[0]
    kept_BS = largest(scores_BL, 4)
    plain = (scores_BL, kept_BS, x_BLD.gather(1, kept_BS.unsqueeze(-1).expand(-1, -1, 5)))
    ours = score_and_take(x_BLD, weight_1D, 4)
    assert torch.equal(ours[1], kept_BS)
    leaves = [x_BLD, weight_1D] if used == 0 else [x_BLD]
    found, expected = (torch.autograd.grad(outputs[used], leaves, grads[used]) for outputs in (ours, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 1000])
@pytest.mark.parametrize("labels", ["all", "some", "none"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 2), (3, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype, shape, labels, vocabulary):
    logits_BLV = (20 * random(*shape, vocabulary, dtype=dtype)).requires_grad_()
    labels_BL = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(2))
    if labels != "all":
        labels_BL[:, :: 1 if labels == "none" else 3] = NO_LABEL
    assert can_use_kernels(logits_BLV)
    assert_same(lambda logits: (token_losses(logits, labels_BL),), [logits_BLV], DTYPES[dtype])
    assert_same(lambda logits: (cross_entropy(logits, labels_BL),), [logits_BLV], DTYPES[dtype])


def test_cross_entropy_of_large_and_infinite_logits_and_of_those_that_are_no_numbers():
    infinite, nan = float("inf"), float("nan")
    rows = [[1e4, -1e4, 0.0], [-infinite, 0, 0], [0, nan, 0], [-infinite, -infinite, -infinite]]
    logits_BLV = torch.tensor([[row, row] for row in rows])  # each is scored once
    labels_BL = torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0]])
    losses = token_losses(logits_BLV, labels_BL)
    assert losses.flatten()[:2].tolist() == [2e4, infinite] and losses.flatten()[2:].isnan().all()
    with in_torch():
        torch.testing.assert_close(losses, token_losses(logits_BLV, labels_BL), equal_nan=True)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8])
def test_cross_entropy_where_the_sum_of_exponentials_is_lost_beside_the_logits(size):
    logits_BLV = torch.full((1, 3, 5), size)
    logits_BLV[..., 3:] = 0
    logits_BLV.requires_grad_()
    labels_BL = torch.tensor([[0, 1, 4]])
    torch.testing.assert_close(
        token_losses(logits_BLV, labels_BL), torch.tensor([[3.0, 3.0]]).log() + torch.tensor([[0, size]])
    )
    assert_same(lambda logits: (token_losses(logits, labels_BL),), [logits_BLV], 1e-6)


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_that_is_no_token_is_refused(label):
    with pytest.raises(IndexError, match=rf"label {label} is no token: there are 7"):
        token_losses(torch.zeros(2, 300, 7), torch.full((2, 300), label))


def test_what_they_do_not_take():
    x = torch.ones(2, 4)
    assert can_use_kernels(x, x)
    others = (x.bfloat16(),), (x, x.double()), (x.to("meta"),)
    assert not any(can_use_kernels(*tensors) for tensors in others)
    with pytest.raises(RuntimeError, match=r"rms_norm: shapes must be \[T, D\] and \[D\]"):
        RMSNorm(3, eps=1e-5)(x)
    with pytest.raises(RuntimeError, match="rotate: shapes must be"):
        rotate_heads(torch.ones(2, 3, 3, 4), torch.ones(1, 3, 2), torch.ones(1, 3, 2), 1)
    with pytest.raises(RuntimeError, match="route: shapes must be"):
        route(x, x, None, 3)
    with pytest.raises(RuntimeError, match="cross_entropy: shapes must be"):
        operators.cross_entropy(x, torch.zeros(3, dtype=torch.int64), NO_LABEL)
    with pytest.raises(RuntimeError, match="score_backward: shapes must be"):
        torch.ops.deepspeed_mode.score_backward(torch.ones(3), x, torch.ones(4))
    norm = RMSNorm(4, eps=1e-5)
    gradient = torch.func.grad(lambda weight: torch.func.functional_call(norm, {"weight": weight}, x).sum())
    torch.testing.assert_close(gradient(norm.weight.detach()), torch.full((4,), 2 / (1 + 1e-5) ** 0.5))
    seen = []
    torch.compile(lambda x: (seen.append(can_use_kernels(x)), x + 1)[1], backend="eager")(x)
    assert seen == [False]


def test_kernels_are_registered_for_cpus_alone():
    """A tensor of another device is refused by torch; its pointer never reaches the kernel."""
    for name in ("mix", "route", "rms_norm", "rotate", "score_backward", "cross_entropy"):
        operator = f"deepspeed_mode::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"), name
        assert not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, "CUDA"), name


KERNEL_CALLS = {
    "mix": lambda x: operators.mix(
        x, CHOICES, GATES, *(random(3, *s, seed=4).requires_grad_() for s in ((7, 6), (6, 7), (7, 6)))
    ),
    "route": lambda x: route(x, random(4, 6, seed=5).requires_grad_(), None, 2)[3],
    "score": lambda x: score_and_take(x.unsqueeze(0), random(1, 6, seed=6).requires_grad_(), 3)[2],
    "rms_norm": lambda x: operators.rms_norm(x, random(6, seed=7), 1e-5),
    "cross_entropy": lambda x: operators.cross_entropy(x, torch.arange(9) % 6, NO_LABEL),
}
CHOICES = torch.arange(9).view(9, 1) % 4  # the fourth is no expert
GATES = random(9, 1, seed=8)


@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_a_count_of_operations_and_fake_tensors_see_a_kernel_as_they_see_torchs_operators(name):
    x = random(9, 6).requires_grad_()
    counts = []
    for way in (nullcontext, in_torch):
        with way(), FlopCounterMode(display=False) as counter:
            KERNEL_CALLS[name](x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as fake:
        x_fake = fake.from_tensor(x)
        out = KERNEL_CALLS[name](x_fake)
        assert out.shape == KERNEL_CALLS[name](x_fake).shape
