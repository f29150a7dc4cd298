"""`DepthRouted` around the decoder layers of transformers equals those layers on the kept tokens alone.

Small random Llama and Qwen3-MoE, built from configurations: nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
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


@pytest.mark.parametrize("selection", ["learned", "token_choice"])
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_routed_decoder_layer_equals_it_on_the_kept_tokens_alone(family, attention, side, selection, training):
    model = route(build(family, attention), [0], capacity_fraction=0.4, selection=selection).train(training)
    routed, x, mask = model.model.layers[0], stream(), padding(side)
    positions = positions_of(mask)
    out, routing = run(model.model, inputs_embeds=x, attention_mask=mask, position_ids=positions)
    expected = on_the_kept_alone(model, routed, x, positions, routing)
    actual = out.last_hidden_state
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    inputs = {"x": x, **dict(routed.named_parameters())}
    assert_same_with_gradients(actual, model.model.norm(expected), inputs, tolerance=1e-10)
    assert not (routing.kept_BL() & ~real).any()
    if training and selection == "learned":
        assert routing.kept_BL().sum(1).tolist() == [min(4, count) for count in real.sum(1).tolist()]
