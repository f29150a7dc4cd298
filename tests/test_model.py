"""The whole model: determinism, checkpointing, layout-independent weights, and routing under training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mode import load_config
from mode.layers import Initial
from mode.moe.experts import build_experts
from mode.transformer.model import ModeTransformer
from tests import reference
from tests.helpers import make_config
from tests.launch import ROOT

IDS = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
NO_OPS = {"num_no_ops": 1, "no_op_fraction": 0.25}
KINDS = {
    "dense": {},
    "moe": {"experts": {"balance_loss": {}}},
    "mod": {"depth": {"predictor": {"width": 8}}},
    "staged": {"experts": {}, "depth": {"predictor": {"width": 8}}},
    "integrated": {"experts": {**NO_OPS, "balance_loss": {}, "backend": "grouped_mm"}},
    "both": {"experts": {**NO_OPS, "balance_loss": {}, "capacity_factor": 0.5}, "depth": {"aux_loss": {}}},
    "stochastic": {"depth": {"selection": "stochastic", "gate": "one"}},
    "token choice": {"depth": {"selection": "token_choice", "balance_weight": 0.1}, "experts": {}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_twice_is_bit_equal(kind):
    model = ModeTransformer(make_config(**KINDS[kind])).eval()
    first, second = model(IDS, labels=IDS), model(IDS, labels=IDS)
    assert torch.equal(first.logits, second.logits) and torch.equal(first.loss, second.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_keeps_routes_loss_gradients_and_counts(kind):
    plain = ModeTransformer(make_config(**KINDS[kind]))
    checkpointed = ModeTransformer(make_config(model={"activation_checkpointing": True}, **KINDS[kind]))
    results = []
    for model in (plain, checkpointed):
        out = model(IDS, labels=IDS)
        out.loss.backward()
        results.append((model, out))
    (_, first), (_, second) = results
    assert torch.equal(first.loss, second.loss)
    assert [record.counts() for record in first.routing] == [record.counts() for record in second.routing]
    for a, b in zip(first.routing, second.routing, strict=True):
        if a.depth is not None:
            assert torch.equal(a.depth.kept_BS, b.depth.kept_BS)
        if a.experts is not None:
            assert torch.equal(a.experts.choices_TK, b.experts.choices_TK)
    for (name, p), q in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_finite_gradient(kind):
    model = ModeTransformer(make_config(**KINDS[kind]))
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_stay(kind):
    model = ModeTransformer(make_config(**KINDS[kind])).bfloat16()
    out = model(IDS, labels=IDS)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(record.depth is None or record.depth.logits_BL.dtype == torch.float32 for record in out.routing)


@pytest.mark.parametrize("kind", ["dense", "moe", "integrated"])
def test_without_depth_routing_the_future_does_not_change_the_past(kind):
    model = ModeTransformer(make_config(**KINDS[kind])).eval()
    changed = IDS.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 40
    torch.testing.assert_close(model(IDS).logits[:, :10], model(changed).logits[:, :10])
    assert not torch.equal(model(IDS).logits[:, 10:], model(changed).logits[:, 10:])


@pytest.mark.parametrize("kind", KINDS)
def test_in_causal_use_the_future_never_changes_the_past(kind):
    model = ModeTransformer(make_config(**KINDS[kind])).eval()
    for first_changed in (1, 7, 15):
        changed = IDS.clone()
        changed[:, first_changed:] = (changed[:, first_changed:] + 1) % 40
        past = [model(ids, causal=True).logits[:, :first_changed] for ids in (IDS, changed)]
        torch.testing.assert_close(*past)


def test_in_causal_use_the_predictor_decides_or_without_one_the_router():
    with_predictor = ModeTransformer(make_config(depth={"predictor": {"width": 8}}))
    depth = with_predictor(IDS, causal=True).routing[1].depth
    assert torch.equal(depth.kept_BL(), depth.predicted_BL > 0)
    assert torch.equal(depth.gates_BS, depth.logits_BL.gather(1, depth.kept_BS)), "the gate is still the router's"
    depth = ModeTransformer(make_config(depth={"aux_loss": {}}))(IDS, causal=True).routing[1].depth
    assert torch.equal(depth.kept_BL(), depth.logits_BL > 0)


def test_in_causal_use_token_choice_has_no_capacity_and_noise_keeps_its_share():
    config = make_config(depth={"selection": "token_choice", "capacity_fraction": 0.1})
    depth = ModeTransformer(config)(IDS, causal=True).routing[1].depth
    assert torch.equal(depth.kept_BL(), depth.logits_BL > 0) and depth.kept_BL().sum(dim=1).max() > 2
    noise = {"selection": "stochastic", "gate": "one"}
    model = ModeTransformer(make_config(model={"sequence_length": 2000}, depth=noise))
    ids = torch.zeros(4, 2000, dtype=torch.int64)
    kept = model(ids, causal=True, sample_keys=torch.arange(4)).routing[1].depth.kept_BL()
    assert kept.float().mean().item() == pytest.approx(0.25, abs=0.02)
    everyone = ModeTransformer(make_config(depth={**noise, "capacity_fraction": 1.0}))
    assert everyone(IDS, causal=True).routing[1].depth.kept_BL().all()


def test_routers_stay_in_float32_under_autocast():
    model = ModeTransformer(make_config(**KINDS["both"]))
    with torch.autocast("cpu", torch.bfloat16):
        record = model(IDS).routing[1]
    assert record.depth.logits_BL.dtype == record.experts.logits_TJ.dtype == torch.float32


def test_documents_do_not_see_each_other():
    model = ModeTransformer(make_config(**KINDS["moe"])).eval()
    documents = torch.tensor([[0] * 6 + [1] * 10] * 3)
    changed = IDS.clone()
    changed[:, :6] = (changed[:, :6] + 1) % 40
    first, second = model(IDS, documents=documents), model(changed, documents=documents)
    torch.testing.assert_close(first.logits[:, 6:], second.logits[:, 6:])


def test_stochastic_routing_follows_the_sample_keys():
    model = ModeTransformer(make_config(**KINDS["stochastic"]))
    keys = torch.tensor([11, 12, 13])
    kept = model(IDS, sample_keys=keys).routing[1].depth.kept_BS
    again = model(IDS[[2, 0]], sample_keys=keys[[2, 0]]).routing[1].depth.kept_BS
    assert torch.equal(kept[[2, 0]], again)
    assert not torch.equal(kept, model(IDS, sample_keys=keys + 100).routing[1].depth.kept_BS)


def test_initial_weights_do_not_depend_on_what_else_was_drawn_or_on_other_features():
    torch.manual_seed(1)
    first = ModeTransformer(make_config(**KINDS["both"])).state_dict()
    torch.manual_seed(2)
    torch.randn(1000)
    second = ModeTransformer(make_config(**KINDS["both"])).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other_seed = ModeTransformer(make_config(**KINDS["both"], seed=5)).state_dict()
    assert not torch.equal(first["embedding.weight"], other_seed["embedding.weight"])
    staged = ModeTransformer(make_config(**KINDS["staged"])).state_dict()
    assert torch.equal(first["blocks.1.body.attention.qkv.weight"], staged["blocks.1.body.attention.qkv.weight"])


def test_every_expert_of_every_layer_draws_weights_of_its_own():
    experts = [block.body.feed_forward.experts for block in ModeTransformer(make_config(experts={})).blocks]
    drawn = [weight.flatten()[:8] for part in experts for stack in (part.w1, part.w2, part.w3) for weight in stack]
    assert len(drawn) == 2 * 3 * 4
    assert len({tuple(weight.tolist()) for weight in drawn}) == len(drawn)


def test_an_expert_draws_the_same_weights_whichever_rank_holds_it():
    config = make_config(experts={})
    initial = Initial.of_experts(seed=3, layer=1)
    whole = build_experts(config.experts, 16, initial)
    for ep_rank in range(2):
        half = build_experts(config.experts, 16, initial, ep_size=2, ep_rank=ep_rank)
        for part in ("w1", "w2", "w3"):
            assert torch.equal(getattr(half, part), getattr(whole, part)[2 * ep_rank :][:2])


# Of each model's initial weights, as the first release drew them: results recorded with it can be reproduced.
FINGERPRINTS = {
    "dense": -4.985803414945369,
    "mod": 24.478977539856537,
    "mod_stochastic": -4.985803414945369,
    "mode": 76.332787098021,
    "mode_integrated": 54.23785639325341,
    "mode_staged": 77.38842588397752,
    "moe": 55.49821604096306,
    "moe_reduced_capacity": 55.49821604096306,
}


def fingerprint(model):
    """A sum over all weights in which every one counts with a factor of its own."""
    total = 0.0
    for place, (_, weight) in enumerate(sorted(model.state_dict().items())):
        flat = weight.detach().double().flatten()
        total += (flat * torch.cos(torch.arange(len(flat), dtype=torch.float64) + place)).sum().item()
    return total


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_the_initial_weights_of_the_shipped_configurations_are_those_of_the_first_release(name):
    model = ModeTransformer(load_config(ROOT / "ds_configs" / f"{name}.json"))
    assert fingerprint(model) == pytest.approx(FINGERPRINTS[name], abs=1e-4)


def test_initial_weights_of_every_kind_of_layer_are_those_of_the_first_release():
    every_kind = {"num_shared": 2, "num_no_ops": 1, "no_op_fraction": 0.25}
    model = ModeTransformer(make_config(experts=every_kind, depth={"predictor": {}}, seed=3))
    assert fingerprint(model) == pytest.approx(-0.4805628095968386, abs=1e-5)
    tied = ModeTransformer(make_config(model={"tied_head": True, "qkv_bias": False}, seed=1))
    assert fingerprint(tied) == pytest.approx(4.048151053037064, abs=1e-5)


def test_initial_scale_keeps_the_stream_and_the_loss_sane():
    config = make_config(model={"num_layers": 8, "width": 64, "vocab_size": 512}, depth={}, experts={})
    ids = torch.randint(512, (4, 16), generator=torch.Generator().manual_seed(0))
    out = ModeTransformer(config)(ids, labels=ids)
    assert out.losses["cross_entropy"].item() == pytest.approx(torch.tensor(512.0).log().item(), rel=0.03)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (2, 2, 32), (1, 1, 128), (2, 1, 128)])
def test_with_a_bias_the_first_head_of_every_block_begins_by_looking_at_the_previous_token(heads, kv_heads, width):
    model = {"width": width, "num_heads": heads, "num_kv_heads": kv_heads, "qkv_bias": True, "sequence_length": 256}
    config = make_config(model=model, depth={})
    for block in ModeTransformer(config).blocks:
        head_width, bias = config.model.head_width, block.body.attention.qkv.bias
        query, key = bias[:head_width], bias[heads * head_width : (heads + 1) * head_width]
        assert torch.count_nonzero(bias) == torch.count_nonzero(query) + torch.count_nonzero(key)
        last = reference.rotate(query, 255, config.model.rope_theta)
        logits = torch.stack([last @ reference.rotate(key, place, config.model.rope_theta) for place in range(256)])
        assert (logits / head_width**0.5).softmax(dim=0)[254] > 0.79


def test_a_tied_head_shares_the_embedding_and_an_untied_one_does_not():
    tied, untied = (ModeTransformer(make_config(model={"tied_head": tied})) for tied in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert not torch.equal(untied.head.weight, untied.embedding.weight)


def test_a_row_that_is_too_long_or_no_row_at_all_is_a_clear_error():
    model = ModeTransformer(make_config())
    with pytest.raises(ValueError, match="17 tokens a row, more than mode.model.sequence_length = 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(16,\)"):
        model(torch.zeros(16, dtype=torch.int64))


def test_a_single_token_works():
    for kind in KINDS.values():
        out = ModeTransformer(make_config(**kind)).eval()(torch.tensor([[3]]))
        assert out.logits.shape == (1, 1, 40) and out.logits.isfinite().all()


def markov_rows(num_rows: int, length: int, generator: torch.Generator, table: torch.Tensor) -> torch.Tensor:
    """Sequences in which each token has two possible successors."""
    columns = [torch.randint(40, (num_rows,), generator=generator)]
    while len(columns) < length:
        pick = torch.randint(2, (num_rows,), generator=generator)
        columns.append(table[columns[-1], pick])
    return torch.stack(columns, dim=1)


def train(config, steps: int) -> tuple[torch.Tensor, list[float]]:
    """A short real training run: (each layer's no-op share over the last 40 steps, all losses)."""
    model = ModeTransformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(40, (40, 2), generator=generator)
    shares, losses = [], []
    for _ in range(steps):
        ids = markov_rows(512 // config.model.sequence_length, config.model.sequence_length, generator, table)
        out = model(ids, labels=ids)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        model.move_biases({record.layer: record.experts.choice_counts_J() for record in out.routing})
        shares.append(
            [(record.experts.num_no_op() / record.experts.choices_TK.numel()).item() for record in out.routing]
        )
        losses.append(out.losses["cross_entropy"].item())
    return torch.tensor(shares[-40:]).mean(dim=0), losses


@pytest.mark.parametrize(
    "controller",
    [
        {"balance_loss": {"weight": 1.0, "scope": "sequence"}},
        {"balance_loss": {"weight": 1.0, "scope": "global"}},
        {"balance_bias": {}},
    ],
    ids=["loss per sequence", "loss over the batch", "bias"],
)
@pytest.mark.parametrize(
    ("target", "top_k", "seed"), [(0.25, 1, 0), (0.25, 2, 1), (0.5, 1, 0), (0.5, 1, 1), (0.5, 2, 0), (0.5, 2, 1)]
)
def test_either_controller_brings_the_no_op_share_within_two_points_of_the_target(target, top_k, seed, controller):
    experts = {"num_no_ops": 2, "no_op_fraction": target, "top_k": top_k, "backend": "grouped_mm", **controller}
    config = make_config(model={"sequence_length": 128}, experts=experts, seed=seed)
    shares, losses = train(config, steps=300)
    assert (shares - target).abs().max() < 0.02, shares
    assert losses[-1] < losses[0] - 1, "the model learns meanwhile"


def test_the_plain_model_imports_no_deepspeed():
    code = (
        "import sys, torch\n"
        "from mode import ModeTransformer\n"
        "from tests.helpers import make_config\n"
        "ModeTransformer(make_config(experts={}, depth={}))(torch.zeros(1, 4, dtype=torch.int64))\n"
        "print([name for name in ('deepspeed', 'megablocks', 'datasets') if name in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True)
    assert done.stdout == "[]\n"
