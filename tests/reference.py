"""The slow truth: every layer written as loops over tokens, straight from the definitions.

Takes its weights from the real modules and shares no code with them, so that tests can compare
outputs and, through autograd, every gradient.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor, nn

from mode.config.settings import ModeConfig


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rms_norm(norm: nn.RMSNorm, x_D: Tensor) -> Tensor:
    return x_D / torch.sqrt((x_D * x_D).sum() / len(x_D) + norm.eps) * norm.weight


def swiglu(w1_FD: Tensor, w2_DF: Tensor, w3_FD: Tensor, x_D: Tensor) -> Tensor:
    return w2_DF @ (silu(w1_FD @ x_D) * (w3_FD @ x_D))


def rotate(x_H: Tensor, position: int, theta: float) -> Tensor:
    half = len(x_H) // 2
    turned = list(x_H)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_H))
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i] = x_H[i] * cos - x_H[i + half] * sin
        turned[i + half] = x_H[i + half] * cos + x_H[i] * sin
    return torch.stack(turned)


def attention(module: nn.Module, config: ModeConfig, x_SD: list[Tensor], positions: list[int], documents: list[int]):
    """Each token looks at the earlier tokens of its own document and at itself, head by head."""
    model = config.model
    heads, groups, width = model.num_heads, model.num_kv_heads, model.head_width
    queries, keys, values = [], [], []
    for x_D, position in zip(x_SD, positions, strict=True):
        bias = module.qkv.bias if model.qkv_bias else 0.0
        projected = (module.qkv.weight @ x_D + bias).reshape(heads + 2 * groups, width)
        queries.append([rotate(projected[n], position, model.rope_theta) for n in range(heads)])
        keys.append([rotate(projected[heads + g], position, model.rope_theta) for g in range(groups)])
        values.append([projected[heads + groups + g] for g in range(groups)])
    outputs = []
    for i in range(len(x_SD)):
        attended = []
        for n in range(heads):
            g = n // (heads // groups)
            seen = [j for j in range(i + 1) if documents[j] == documents[i]]
            weights = torch.stack([torch.exp(queries[i][n] @ keys[j][g] / math.sqrt(width)) for j in seen])
            attended.append(sum(w / weights.sum() * values[j][g] for w, j in zip(weights, seen, strict=True)))
        outputs.append(module.out.weight @ torch.cat(attended))
    return outputs


def largest(values: list[float], count: int) -> list[int]:
    """Positions of the `count` largest, earlier ones first among equals, ascending."""
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])


def moe(layer: nn.Module, config: ModeConfig, x_TD: list[Tensor]) -> list[Tensor]:
    """Token by token, choice by choice; expert capacity over this list of tokens if training."""
    experts = config.experts
    assert experts is not None
    router = layer.router
    bias = torch.zeros(experts.num_columns) if router.bias_J is None else router.bias_J
    choices: list[list[tuple[int, Tensor]]] = []
    for x_D in x_TD:
        logits = router.scorer.weight @ x_D
        scores = torch.exp(logits) / torch.exp(logits).sum()
        ranked = sorted(range(experts.num_columns), key=lambda j: (-(logits[j] + bias[j]).item(), j))
        columns = ranked[: experts.top_k]
        gates = [scores[j] for j in columns]
        if experts.renormalize:
            gates = [gate / sum(gates) for gate in gates]
        choices.append(list(zip(columns, gates, strict=True)))

    capacity = len(x_TD) * experts.top_k
    if experts.capacity_factor is not None and layer.training:
        share = Fraction(str(experts.capacity_factor)) * (1 - Fraction(str(experts.no_op_fraction)))
        capacity = math.ceil(share * experts.top_k * len(x_TD) / experts.num_experts)
    taken: set[tuple[int, int]] = set()  # (token, expert)
    for e in range(experts.num_experts):
        wanting = [(-gate.item(), t) for t, chosen in enumerate(choices) for j, gate in chosen if j == e]
        taken |= {(t, e) for _, t in sorted(wanting)[:capacity]}

    outputs = []
    for t, x_D in enumerate(x_TD):
        total = 0 * x_D
        for j, gate in choices[t]:
            if (t, j) in taken:
                total = total + gate * swiglu(layer.experts.w1[j], layer.experts.w2[j], layer.experts.w3[j], x_D)
        if experts.num_shared:
            total = total + swiglu(layer.shared.w1.weight, layer.shared.w2.weight, layer.shared.w3.weight, x_D)
        outputs.append(total)
    return outputs


def body_updates(
    body: nn.Module, config: ModeConfig, rows: list[tuple[list[Tensor], list[int], list[int]]]
) -> list[list[Tensor]]:
    """The body's update for several rows of (tokens, positions, documents). Experts see all rows at once."""
    attended, middles = [], []
    for x_SD, positions, documents in rows:
        normed = [rms_norm(body.attention_norm, x_D) for x_D in x_SD]
        attended.append(attention(body.attention, config, normed, positions, documents))
        middles.append(
            [rms_norm(body.feed_forward_norm, x + a) for x, a in zip(x_SD, attended[-1], strict=True)],
        )
    flat = [x_D for middle in middles for x_D in middle]
    if config.experts is None:
        ff = body.feed_forward.swiglu
        mixed = [swiglu(ff.w1.weight, ff.w2.weight, ff.w3.weight, x_D) for x_D in flat]
    else:
        mixed = moe(body.feed_forward, config, flat)
    remaining = iter(mixed)
    return [[a + next(remaining) for a in row] for row in attended]


def block(module: nn.Module, config: ModeConfig, x_BLD: Tensor, documents_BL: Tensor | None = None) -> Tensor:
    """A plain or a learned / token-choice depth-routed block, eq. 1 of the paper."""
    num_rows, length, _ = x_BLD.shape
    rows, gates, kept = [], [], []
    for b in range(num_rows):
        tokens = list(x_BLD[b])
        documents = [0] * length if documents_BL is None else documents_BL[b].tolist()
        if config.is_routed(module.layer):
            assert config.depth is not None
            logits = [module.router.scorer.weight[0] @ x_D for x_D in tokens]
            capacity = math.ceil(Fraction(str(config.depth.capacity_fraction)) * length)
            chosen = largest([r.item() for r in logits], capacity)
            if config.depth.selection == "token_choice":
                chosen = [i for i in chosen if logits[i] > 0]
            to_gate = {"raw": lambda r: r, "sigmoid": lambda r: 1 / (1 + torch.exp(-r)), "tanh": torch.tanh}
            gates.append([to_gate[config.depth.gate](logits[i]) for i in chosen])
        else:
            chosen = list(range(length))
            gates.append([torch.ones((), dtype=x_BLD.dtype)] * length)
        kept.append(chosen)
        rows.append(([tokens[i] for i in chosen], chosen, [documents[i] for i in chosen]))
    updates = body_updates(module.body, config, rows)
    out = []
    for b in range(num_rows):
        tokens = list(x_BLD[b])
        for i, gate, update in zip(kept[b], gates[b], updates[b], strict=True):
            tokens[i] = tokens[i] + gate * update
        out.append(torch.stack(tokens))
    return torch.stack(out)
