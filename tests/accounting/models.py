"""Small models for the tests of accounting: one to work out by hand, and any kind drawn at random."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from mode.accounting import BlockCounts
from mode.config.settings import ModeConfig


def tiny(**parts: Any) -> ModeConfig:
    model = {
        "vocab_size": 10,
        "num_layers": 2,
        "width": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_width": 12,
        "sequence_length": 8,
    }
    return ModeConfig.from_dict({"model": model, **parts})


@st.composite
def configs(draw: st.DrawFn, experts: bool | None = None, depth: bool | None = None) -> ModeConfig:
    """Any kind of small model: dense or with experts, routed in depth or not, as `experts` and `depth` ask."""
    head_width, num_kv_heads = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    num_layers, length = draw(st.integers(1, 5)), draw(st.integers(2, 200))
    tree: dict[str, Any] = {
        "model": {
            "vocab_size": draw(st.integers(2, 100)),
            "num_layers": num_layers,
            "width": num_heads * head_width,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "ffn_width": draw(st.integers(1, 40)),
            "sequence_length": length,
            "qkv_bias": draw(st.booleans()),
            "tied_head": draw(st.booleans()),
            "activation_checkpointing": draw(st.booleans()),
        }
    }
    if draw(st.booleans()) if experts is None else experts:
        tree["experts"] = draw(experts_sections())
    if draw(st.booleans()) if depth is None else depth:
        selection = draw(st.sampled_from(["learned", "stochastic", "token_choice"]))
        tree["depth"] = {
            "capacity_fraction": draw(kept_fractions(length)),
            "every": draw(st.integers(1, num_layers)),
            "selection": selection,
            "predictor": {"width": draw(st.integers(1, 9))} if selection == "learned" and draw(st.booleans()) else None,
        }
    return ModeConfig.from_dict(tree)


@st.composite
def experts_sections(draw: st.DrawFn) -> dict[str, Any]:
    num_experts, num_no_ops = draw(st.integers(1, 8)), draw(st.integers(0, 4))
    top_k = draw(st.integers(1, min(4, num_experts)))  # at most E, so that any small no-op share can be reached
    thousandths = draw(st.integers(1, min(999, 1000 * num_no_ops // top_k))) if num_no_ops else 0
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "width": draw(st.integers(1, 40)),
        "num_no_ops": num_no_ops,
        "no_op_fraction": thousandths / 1000,
        "capacity_factor": draw(st.none() | st.integers(1, 3000).map(lambda value: value / 1000)),
        "num_shared": draw(st.integers(0, 2)),
        "backend": "loop",  # takes any width
    }


def kept_fractions(length: int) -> st.SearchStrategy[float]:
    """Capacity fractions that keep at least one of `length` tokens."""
    return st.integers(math.ceil(1000 / length), 1000).map(lambda thousandths: thousandths / 1000)


@st.composite
def configs_with_counts(draw: st.DrawFn) -> tuple[ModeConfig, list[BlockCounts]]:
    """A model, and routes that conserve tokens and assignments but are otherwise arbitrary."""
    config, rows = draw(configs()), draw(st.integers(1, 4))
    length = config.model.sequence_length
    counts = []
    for layer in range(config.model.num_layers):
        slots = draw(st.integers(0, length)) if config.is_routed(layer) else length
        tokens = draw(st.integers(0, rows * slots)) if config.is_routed(layer) else rows * slots
        choices = tokens * config.experts.top_k if config.experts is not None else 0
        processed = draw(st.integers(0, choices))
        no_op = draw(st.integers(0, choices - processed))
        counts.append(BlockCounts(rows, length, slots, tokens, processed, no_op, choices - processed - no_op))
    return config, counts
