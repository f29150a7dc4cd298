"""Depth routing against eq. 1 of the paper and against the mistakes seen elsewhere."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mode.accounting import depth_capacity
from mode.depth.noise import keyed_noise
from mode.depth.router import pack
from mode.moe.layer import LocalMoE
from mode.ops.operators import largest
from mode.records import DepthRouting, collect_routing
from mode.transformer.attention import Grid, rope_tables
from mode.transformer.block import Block, DepthRoutedBlock
from tests import reference
from tests.helpers import assert_same_with_gradients, make_config, place, spread_weights

KEYS = torch.zeros(2, dtype=torch.int64)


def routed_block(config, seed=0):
    return spread_weights(DepthRoutedBlock(config, 1, LocalMoE).double(), seed)


def run(block, *inputs):
    """(the output, the depth router's record)."""
    with collect_routing(block) as records:
        out = block(*inputs)
    return out, next(record.routing for record in records if isinstance(record.routing, DepthRouting))


def random_stream(num_rows=2, length=10, width=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, length, width, generator=generator, dtype=torch.float64, requires_grad=True)


def two_documents(num_rows=2, length=10):
    documents = torch.zeros(num_rows, length, dtype=torch.int64)
    documents[:, length // 3 :] = 1
    documents[-1, length // 2 :] = 2
    return documents


@pytest.mark.parametrize("experts", [None, {"num_no_ops": 1, "no_op_fraction": 0.25}], ids=["dense", "experts"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed documents"])
@pytest.mark.parametrize(
    "depth",
    [
        {"gate": "raw"},
        {"gate": "sigmoid"},
        {"gate": "tanh"},
        {"gate": "raw", "capacity_fraction": 0.05},
        {"gate": "raw", "capacity_fraction": 1.0},
        {"gate": "sigmoid", "selection": "token_choice", "capacity_fraction": 0.5},
        {"gate": "raw", "selection": "token_choice", "capacity_fraction": 1.0},
    ],
    ids=lambda depth: "-".join(str(value) for value in depth.values()),
)
def test_routed_block_equals_loop_reference_in_outputs_and_all_gradients(depth, packed, experts):
    config = make_config(model={"sequence_length": 40, "qkv_bias": True}, depth=depth, experts=experts)
    block, x_BLD = routed_block(config), random_stream()
    documents = two_documents() if packed else None
    actual = block(x_BLD, place(config, 2, 10, documents), KEYS)
    expected = reference.block(block, config, x_BLD, documents)
    inputs = {"x": x_BLD, **dict(block.named_parameters())}
    assert_same_with_gradients(actual, expected, inputs, tolerance=1e-10)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_plain_block_equals_loop_reference(packed, qkv_bias):
    config = make_config(model={"qkv_bias": qkv_bias}, depth={})
    block, x_BLD = spread_weights(Block(config, 0, LocalMoE).double()), random_stream()
    documents = two_documents() if packed else None
    actual = block(x_BLD, place(config, 2, 10, documents), KEYS)
    expected = reference.block(block, config, x_BLD, documents)
    assert_same_with_gradients(actual, expected, {"x": x_BLD, **dict(block.named_parameters())}, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("selection", ["learned", "stochastic", "token_choice"])
def test_skipped_tokens_pass_through_unchanged(selection, dtype):
    gate = "one" if selection == "stochastic" else "raw"
    config = make_config(depth={"selection": selection, "gate": gate})
    block = spread_weights(DepthRoutedBlock(config, 1, LocalMoE).to(dtype))
    x_BLD = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_BLD[0, 5, 3] = -0.0  # adding +0.0 to it would flip its sign bit
    keys = torch.zeros(3, dtype=torch.int64)
    out, routing = run(block, x_BLD, place(config, 3, 16, dtype=dtype), keys)
    skipped = ~routing.kept_BL()
    assert skipped.sum() >= 3 * 12
    assert out.dtype == dtype
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    assert torch.equal(out[skipped].view(bits), x_BLD[skipped].view(bits))
    assert not torch.equal(out[~skipped], x_BLD[~skipped])


@given(st.lists(st.lists(st.integers(-2, 2), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 7))
def test_exactly_c_are_kept_for_any_ties_and_the_earlier_of_equals(rows, capacity):
    logits = torch.tensor(rows, dtype=torch.float32)
    kept = largest(logits, capacity)
    assert kept.tolist() == [reference.largest(row, capacity) for row in rows]


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_packed_slots_name_the_kept_tokens_in_order(rows):
    positions, valid = pack(torch.tensor(rows))
    for row, kept, real in zip(rows, positions, valid, strict=True):
        assert kept[real].tolist() == [i for i, keep in enumerate(row) if keep]
        assert not real[int(real.sum()) :].any(), "fillers stand at the end"
        assert len(set(kept.tolist())) == len(kept), "a filler never names a kept token"


def test_all_zero_inputs_tie_and_still_keep_exactly_c_per_row():
    config = make_config(depth={"capacity_fraction": 0.3})
    x_BLD = torch.zeros(2, 10, 16, dtype=torch.float64)
    _, routing = run(routed_block(config), x_BLD, place(config, 2, 10), KEYS)
    assert routing.kept_BS.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("selection", ["learned", "stochastic", "token_choice"])
def test_a_batch_of_two_equals_two_batches_of_one(selection):
    gate = "one" if selection == "stochastic" else "raw"
    config = make_config(depth={"selection": selection, "gate": gate, "capacity_fraction": 0.4}, experts={})
    block, x_BLD = routed_block(config), random_stream()
    keys = torch.tensor([5, 9])
    both = block(x_BLD, place(config, 2, 10), keys)
    for b in range(2):
        alone = block(x_BLD[b : b + 1], place(config, 1, 10), keys[b : b + 1])
        torch.testing.assert_close(both[b : b + 1], alone, rtol=1e-12, atol=1e-12)


def test_capacity_one_with_gate_one_equals_the_plain_block():
    config = make_config(depth={"selection": "stochastic", "gate": "one", "capacity_fraction": 1.0}, experts={})
    routed, plain = routed_block(config), Block(config, 1, LocalMoE).double()
    plain.body.load_state_dict(routed.body.state_dict())
    x_BLD, grid = random_stream(), place(config, 2, 10)
    torch.testing.assert_close(routed(x_BLD, grid, KEYS), plain(x_BLD, grid, KEYS), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("packed", [False, True])
def test_routed_block_equals_the_dense_block_on_the_subsequence_with_original_positions(packed):
    config = make_config(depth={"capacity_fraction": 0.4})
    block, x_BLD = routed_block(config), random_stream()
    documents = two_documents() if packed else None
    out, routing = run(block, x_BLD, place(config, 2, 10, documents), KEYS)
    for b in range(2):
        kept = routing.kept_BS[b]
        own_documents = None if documents is None else documents[b : b + 1, kept]
        update = block.body(x_BLD[b : b + 1, kept], placed_at(config, kept, own_documents))
        expected = x_BLD[b, kept] + routing.gates_BS[b].unsqueeze(-1) * update[0]
        torch.testing.assert_close(out[b, kept], expected, rtol=1e-12, atol=1e-12)


def placed_at(config, positions, documents):
    """The grid of one row whose tokens stand at the given positions."""
    cos, sin = rope_tables(positions.unsqueeze(0), config.model.head_width, config.model.rope_theta, torch.float64)
    return Grid.of_sequence(positions.unsqueeze(0), cos, sin, documents)


def test_routed_blocks_are_every_other_block_and_block_zero_sees_everything():
    config = make_config(model={"num_layers": 6}, depth={})
    assert [config.is_routed(layer) for layer in range(6)] == [False, True, False, True, False, True]


def test_token_choice_keeps_who_wants_and_at_most_the_capacity():
    config = make_config(depth={"selection": "token_choice", "gate": "raw", "capacity_fraction": 0.3})
    x_BLD = random_stream(num_rows=4, length=10)
    _, routing = run(routed_block(config), x_BLD, place(config, 4, 10), torch.zeros(4, dtype=torch.int64))
    for logits, kept in zip(routing.logits_BL, routing.kept_BL(), strict=True):
        wanting = [i for i in range(10) if logits[i] > 0]
        best = sorted(wanting, key=lambda i: (-logits[i].item(), i))[:3]
        assert kept.nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize("experts", [None, {}], ids=["dense", "experts"])
def test_a_token_choice_block_that_nobody_enters_passes_all_through_and_gives_zero_gradients(experts):
    config = make_config(depth={"selection": "token_choice", "gate": "raw"}, experts=experts)
    block = routed_block(config)
    with torch.no_grad():
        block.router.scorer.weight.zero_()  # logit 0 is not above 0
    x_BLD = random_stream()
    out, routing = run(block, x_BLD, place(config, 2, 10), KEYS)
    assert torch.equal(out, x_BLD)
    assert routing.kept_BS.shape == (2, 0)
    out.square().sum().backward()
    for name, parameter in block.body.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_stochastic_noise_is_standard_normal_and_depends_on_every_part_of_its_key():
    keys = torch.arange(2000)
    noise = keyed_noise(keys, seed=1, layer=2, length=64)
    assert noise.dtype == torch.float32 and noise.shape == (2000, 64)
    assert abs(noise.mean().item()) < 0.01 and abs(noise.std().item() - 1) < 0.01
    assert abs((noise > 1.959964).float().mean().item() - 0.025) < 0.002
    assert abs((noise[:, 1:] * noise[:, :-1]).mean().item()) < 0.01, "neighbouring positions are independent"
    assert abs((noise[1:] * noise[:-1]).mean().item()) < 0.01, "neighbouring samples are independent"
    for other in (
        keyed_noise(keys + 1, seed=1, layer=2, length=64),
        keyed_noise(keys, seed=2, layer=2, length=64),
        keyed_noise(keys, seed=1, layer=3, length=64),
    ):
        assert abs((noise * other).mean().item()) < 0.01
    assert torch.equal(noise[7:9], keyed_noise(keys[7:9], seed=1, layer=2, length=64)), "no row sees another"


def test_stochastic_gate_is_one_or_the_noise_itself():
    for gate in ("one", "raw"):
        config = make_config(depth={"selection": "stochastic", "gate": gate})
        _, depth = run(routed_block(config), random_stream(), place(config, 2, 10), KEYS)
        noise = depth.logits_BL.gather(1, depth.kept_BS)
        assert torch.equal(depth.gates_BS, torch.ones_like(noise) if gate == "one" else noise)


@settings(max_examples=200)
@given(st.integers(1, 999), st.integers(1, 5000))
def test_capacity_is_the_exact_ceiling(thousandths, length):
    assert depth_capacity(thousandths / 1000, length) == -(-thousandths * length // 1000)


def test_inputs_are_not_changed_in_place():
    config = make_config(depth={}, experts={})
    block, x_BLD = routed_block(config), random_stream()
    before = x_BLD.detach().clone()
    block(x_BLD, place(config, 2, 10), KEYS)
    assert torch.equal(x_BLD.detach(), before)


@pytest.mark.parametrize("depth", [{}, {"selection": "stochastic", "gate": "one"}], ids=["learned", "stochastic"])
def test_a_router_told_to_keep_another_share_keeps_it(depth):
    block = routed_block(make_config(depth={"capacity_fraction": 0.125, **depth}))
    x_BLD = random_stream(length=24)
    for kept, capacity in ((Fraction(1), 24), (Fraction(1, 3), 8), (Fraction(3, 10), 8)):
        assert block.router(x_BLD, KEYS, kept)[0].kept_BS.shape == (2, capacity)


def test_chance_decides_by_the_share_that_is_kept():
    positions_BL = torch.arange(4000).expand(2, -1)
    for kept in (1.0, 0.66, 0.125):
        depth = {"selection": "stochastic", "gate": "one", "capacity_fraction": kept}
        router = routed_block(make_config(depth=depth)).router
        keep_BL = router.decide(torch.zeros(2, 4000, 16), KEYS, positions_BL, "router").keep_BL
        assert keep_BL.double().mean().item() == pytest.approx(kept, abs=0.02)
