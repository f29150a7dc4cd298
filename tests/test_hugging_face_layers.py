"""`DepthRouted` around the decoder layers of transformers equals those layers on the kept tokens alone.

Small random Llama and Qwen3-MoE, built from configurations: nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import mode
from mode.records import DepthRouting
from tests.helpers import assert_same_with_gradients, spread_weights

WIDTH, LENGTH, ROWS, VOCABULARY = 16, 9, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
CHANCE = {"selection": "stochastic", "gate": "one"}
FAMILIES = ["llama", "qwen3_moe"]


def build(family: str, attention: str = "sdpa", num_layers: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    """A causal language model of `family` with weights large enough that every term of a gradient shows."""
    settings = {**SIZES, "num_hidden_layers": num_layers, "attn_implementation": attention}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts, experts_implementation="eager"))
    return spread_weights(model.to(dtype))


def route(model: Any, layers: list[int], **settings: Any) -> Any:
    """Wraps some of the model's decoder layers; nothing is named."""
    for number in layers:
        routed = mode.DepthRouted(model.model.layers[number], WIDTH, **{"layer": number, **settings})
        model.model.layers[number] = routed.to(next(model.parameters()).dtype)
    return model


def padding(side: str) -> Tensor | None:
    """[ROWS, LENGTH], 0 at padding: no padding, some and nearly all of a row."""
    if side == "none":
        return None
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 5, 2]).unsqueeze(1)
    return (real if side == "right" else real.flip(1)).long()


def positions_of(mask: Tensor | None) -> Tensor:
    """Each token's place among the real ones of its row, as `generate` counts them."""
    if mask is None:
        return torch.arange(LENGTH).expand(ROWS, -1)
    return (mask.cumsum(1) - 1).clamp(min=0)


def stream(seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def run(model: Any, **inputs: Any) -> tuple[Any, DepthRouting]:
    with mode.collect_routing(model) as records:
        out = model(**inputs, use_cache=False)
    return out, next(record.routing for record in records if isinstance(record.routing, DepthRouting))


def kept_of(routing: DepthRouting, row: int) -> Tensor:
    return routing.kept_BL()[row].nonzero().flatten()


def on_the_kept_alone(model: Any, routed: mode.DepthRouted, x: Tensor, positions: Tensor, routing: Any) -> Tensor:
    """The layer on every row's kept tokens, one row at a time, and eq. 1 of the paper written out."""
    rows = []
    for row, own in enumerate(x):
        kept = kept_of(routing, row)
        tokens = own[kept].unsqueeze(0)
        rotary = model.model.rotary_emb(tokens, position_ids=positions[row, kept].unsqueeze(0))
        seen = torch.ones(len(kept), len(kept), dtype=torch.bool).tril()[None, None]
        mask = seen if model.config._attn_implementation == "sdpa" else torch.zeros(seen.shape).double()
        if mask.dtype != torch.bool:
            mask = mask.masked_fill(~seen, torch.finfo(torch.float64).min)
        update = routed.block(tokens, attention_mask=mask, position_embeddings=rotary)[0] - tokens[0]
        if routed.depth_config.selection == "stochastic":
            gates = torch.ones(len(kept), 1)
        else:
            gates = own[kept] @ routed.router.scorer.weight.T
        rows.append(own.index_add(0, kept, gates * update))
    return torch.stack(rows)


@pytest.mark.parametrize("selection", ["learned", "stochastic", "token_choice"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_routed_decoder_layer_equals_it_on_the_kept_tokens_alone(family, attention, side, selection, training):
    gate = "one" if selection == "stochastic" else "raw"
    model = route(build(family, attention), [0], capacity_fraction=0.4, selection=selection, gate=gate).train(training)
    routed, x, mask = model.model.layers[0], stream(), padding(side)
    positions = positions_of(mask)
    out, routing = run(model.model, inputs_embeds=x, attention_mask=mask, position_ids=positions)
    expected = on_the_kept_alone(model, routed, x, positions, routing)
    actual = out.last_hidden_state
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    inputs = {"x": x, **dict(routed.named_parameters())}
    assert_same_with_gradients(actual, model.model.norm(expected), inputs, tolerance=1e-10)
    assert not (routing.kept_BL() & ~real).any()
    if training and selection != "token_choice":
        assert routing.kept_BL().sum(1).tolist() == [min(4, count) for count in real.sum(1).tolist()]


def real_tokens(mask: Tensor | None) -> Tensor:
    return torch.ones(ROWS, LENGTH, dtype=torch.bool) if mask is None else mask.bool()


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_capacity_one_with_gate_one_equals_the_plain_model(family, attention, side, training):
    plain = build(family, attention, num_layers=2).train(training)
    routed = route(build(family, attention, num_layers=2), [0, 1], capacity_fraction=1.0, **CHANCE).train(training)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = padding(side)
    positions, real = positions_of(mask), real_tokens(mask)
    # Without padding, one row at a time: in float64 eager attention of transformers is NaN where a token sees nothing.
    alone = [(own[keep], own_positions[keep]) for own, own_positions, keep in zip(ids, positions, real, strict=True)]
    expected = torch.cat([plain(own[None], position_ids=at[None], use_cache=False).logits[0] for own, at in alone])
    actual = routed(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[real]
    found = []
    for model, logits in ((plain, expected), (routed, actual)):
        logits.square().mean().backward()
        found.append({name.replace(".block.", "."): p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_skipped_tokens_and_padding_pass_through_to_the_bit(dtype, side, training):
    model = route(build("llama", dtype=dtype), [0], capacity_fraction=0.4).train(training)
    model.model.norm = torch.nn.Identity()
    x, mask = stream().detach().to(dtype), padding(side)
    x[0, :, 3] = -0.0  # adding +0.0 to it would flip its sign bit
    out, routing = run(model.model, inputs_embeds=x, attention_mask=mask)
    skipped, out = ~routing.kept_BL(), out.last_hidden_state
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    assert 0 < skipped.sum() < skipped.numel()
    assert torch.equal(out[skipped].view(bits), x[skipped].view(bits))
    assert not (out[~skipped] == x[~skipped]).all(dim=-1).any()


CAUSAL: dict[str, dict[str, Any]] = {
    "router": {"aux_weight": 0.01},
    "predictor": {"predictor_width": 4},
    "chance": CHANCE,
    "token choice": {"selection": "token_choice", "gate": "sigmoid"},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", CAUSAL)
def test_in_evaluation_no_token_sees_a_later_one_or_another_row(way, attention):
    model = route(build("llama", attention, num_layers=3), [0, 2], capacity_fraction=0.4, **CAUSAL[way])
    model = spread_weights(model, seed=5).eval()
    before = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    after = before.clone()
    after[:, 6:] = (after[:, 6:] + 7) % VOCABULARY
    after[1] = (after[1] + 11) % VOCABULARY
    with torch.no_grad():
        (first, routing), (second, changed) = (run(model, input_ids=ids) for ids in (before, after))
    others = torch.tensor([0, 2])
    torch.testing.assert_close(second.logits[others, :6], first.logits[others, :6], rtol=1e-10, atol=1e-10)
    assert not torch.equal(second.logits[others, 6:], first.logits[others, 6:])
    kept = routing.kept_BL()
    assert kept.any() and not kept.all()
    if way != "chance":
        assert not torch.equal(kept[1], changed.kept_BL()[1])


def test_a_row_that_keeps_nothing_and_a_batch_that_keeps_nothing_are_left_as_they_are():
    model = route(build("qwen3_moe", "eager"), [0], aux_weight=0.01).eval()
    model.model.norm = torch.nn.Identity()
    x, weight = stream().detach(), model.model.layers[0].router.scorer.weight
    with torch.no_grad():
        x[0] = -weight  # the logits of this row are below 0
        x[1:] = weight
        out, routing = run(model.model, inputs_embeds=x)
        assert routing.kept_BL().sum(1).tolist() == [0, LENGTH, LENGTH]
        assert torch.equal(out.last_hidden_state[0], x[0]) and out.last_hidden_state.isfinite().all()
        x[1:] = -weight
        out, routing = run(model.model, inputs_embeds=x)
    assert not routing.kept_BL().any() and torch.equal(out.last_hidden_state, x)


def test_a_cache_is_refused_in_evaluation_and_does_no_harm_in_training():
    model = route(build("llama", num_layers=2), [1], capacity_fraction=0.4)
    ids = torch.arange(LENGTH).unsqueeze(0)
    with pytest.raises(ValueError, match="past_key_values .* pass use_cache=False"):
        model.eval()(ids)
    model.train()
    torch.testing.assert_close(model(ids, use_cache=True).logits, model(ids, use_cache=False).logits, rtol=0, atol=0)


class Experts(torch.nn.Module):
    """`mode.MoE` in the place of a decoder layer's feed-forward."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.moe = mode.MoE(WIDTH, num_experts=4, k=2, expert_width=8, num_no_ops=1, no_op_fraction=0.25, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("selection", ["learned", "token_choice"])
def test_gradient_checkpointing_of_transformers_changes_nothing_and_counts_once(selection, side):
    found = []
    for checkpointing in (False, True):
        model = build("llama", num_layers=2)
        for number, block in enumerate(model.model.layers):
            block.mlp = Experts(layer=number).double()
        model = spread_weights(route(model, [1], capacity_fraction=0.6, selection=selection)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mask, ids = padding(side), torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
        with mode.collect_routing(model) as records:
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        (logits[real_tokens(mask)].square().mean() + mode.auxiliary_loss(records)).backward()
        names = [record.name for record in records]
        assert names == ["model.layers.0.mlp.moe", "model.layers.1.block.mlp.moe", "model.layers.1"]
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
