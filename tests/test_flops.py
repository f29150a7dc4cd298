"""Formula equals count, as integers: parameters and FLOPs of the real model."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mode import accounting
from mode.config.file import load_config
from mode.config.settings import ModeConfig
from mode.transformer.model import ModeTransformer
from tests.helpers import make_config

CONFIGS = sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))


def grouped_mm_flops(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """Rows of `a` times a matrix each, or (in the gradient of the weights) one product over all rows."""
    if len(b_shape) == 3:  # [R, X] by [e, X, Y]
        return 2 * a_shape[0] * b_shape[1] * b_shape[2]
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]  # [X, R] by [R, Y]


def attention_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    key, value = [(tensor[0], query[1], *tensor[2:]) for tensor in (key, value)]  # every query head meets a key head
    return sdpa_flop_count(query, key, value)


def attention_backward_flops(grad, query, key, value, *args, out_shape=None, **kwargs) -> int:
    key, value = [(tensor[0], query[1], *tensor[2:]) for tensor in (key, value)]
    return sdpa_backward_flop_count(grad, query, key, value)


# The operations FlopCounterMode does not know.
FORMULAS = {
    torch.ops.aten._grouped_mm: grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def counted(action) -> int:
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        action()
    return counter.get_total_flops()


def scaled_down(config: ModeConfig) -> ModeConfig:
    """The same kind of model, small enough to run in a blink."""
    model = dataclasses.replace(
        config.model,
        vocab_size=96,
        num_layers=4,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=48,
        sequence_length=24,
    )
    experts = config.experts and dataclasses.replace(config.experts, width=16)
    return dataclasses.replace(config, model=model, experts=experts)


def assert_formulas_equal_counts(config: ModeConfig, rows: int = 3, length: int | None = None) -> None:
    model = ModeTransformer(config)
    assert accounting.num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    for layer, block in enumerate(model.blocks):
        expected = sum(accounting.block_parameters(config, layer).values())
        assert expected == sum(parameter.numel() for parameter in block.parameters())

    generator = torch.Generator().manual_seed(0)
    shape = (rows, length or config.model.sequence_length)
    ids = torch.randint(config.model.vocab_size, shape, generator=generator)
    outputs = []
    forward = counted(lambda: outputs.append(model(ids, labels=ids)))
    backward = counted(lambda: outputs[0].loss.backward())
    flops = accounting.model_flops(config, [record.counts() for record in outputs[0].routing])
    assert forward == flops.forward
    assert backward == flops.backward


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_formulas_equal_counts_for_every_shipped_config(path):
    assert_formulas_equal_counts(scaled_down(load_config(path)))


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"tied_head": False}},
        {"experts": {"num_shared": 2, "backend": "loop"}, "depth": {}},
        {"experts": {"num_shared": 1, "backend": "grouped_mm", "capacity_factor": 0.5}, "depth": {"aux_loss": {}}},
        {"experts": {"num_no_ops": 3, "no_op_fraction": 0.7, "top_k": 2}, "depth": {"predictor": {"width": 5}}},
        {"depth": {"selection": "token_choice", "balance_weight": 0.1}, "experts": {}},
        {"depth": {"selection": "token_choice", "gate": "sigmoid", "capacity_fraction": 0.9}},
        {"depth": {"selection": "stochastic", "gate": "raw", "every": 1}},
        {"depth": {"capacity_fraction": 1.0, "gate": "tanh"}},
    ],
    ids=str,
)
def test_formulas_equal_counts_for_other_options_and_routes_that_differ_from_the_expectation(parts):
    config = make_config(**parts)
    assert_formulas_equal_counts(config)
    assert_formulas_equal_counts(config, rows=1, length=7)


def test_counted_routes_of_an_untrained_router_differ_from_the_expectation():
    config = make_config(experts={"num_no_ops": 3, "no_op_fraction": 0.7})
    model = ModeTransformer(config)
    ids = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
    counts = [record.counts() for record in model(ids).routing]
    expected = accounting.expected_counts(config, rows=3)
    assert [block.processed for block in counts] != [block.processed for block in expected]
    assert [block.assignments for block in counts] == [block.assignments for block in expected]


def test_depth_routed_counts_equal_the_expectation_exactly():
    config = make_config(depth={}, model={"num_layers": 4})
    ids = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
    counts = [record.counts() for record in ModeTransformer(config)(ids).routing]
    assert counts == accounting.expected_counts(config, rows=3)


def test_a_model_told_to_keep_another_share_is_counted_by_it():
    config = make_config(depth={}, experts={"num_no_ops": 0, "no_op_fraction": 0.0}, model={"num_layers": 4})
    ids = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
    model, outputs = ModeTransformer(config), []
    for kept in (Fraction(1), Fraction(5, 8), Fraction(1, 3)):
        forward = counted(lambda share=kept: outputs.append(model(ids, capacity_fraction=share)))
        counts = accounting.expected_counts(config, rows=3, capacity_fraction=kept)
        assert [record.counts() for record in outputs[-1].routing] == counts
        assert forward == accounting.model_flops(config, counts).forward
        assert {block.slots for block in counts[1::2]} == {math.ceil(kept * 16)}


def test_activation_checkpointing_adds_the_blocks_forward_to_backward():
    """torch stops recomputing where nothing more is needed, so the formula is an upper limit, and a near one."""
    parts = {"experts": {"num_no_ops": 1, "no_op_fraction": 0.25}, "depth": {}}
    config = make_config(model={"activation_checkpointing": True}, **parts)
    ids = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
    outputs = []
    forward = counted(lambda: outputs.append(ModeTransformer(config)(ids, labels=ids)))
    backward = counted(lambda: outputs[0].loss.backward())
    counts = [record.counts() for record in outputs[0].routing]
    flops, recompute = accounting.model_flops(config, counts), accounting.recompute_flops(config, counts)
    assert forward == flops.forward
    assert 0.75 * recompute < backward - flops.backward <= recompute
