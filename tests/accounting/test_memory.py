"""Memory, against what DeepSpeed holds and what autograd saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mode import accounting
from mode.accounting import ZeroSettings
from mode.config.file import load_config, run_config_from_dict
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig
from mode.ops import operators
from mode.transformer.model import ModeTransformer
from tests.accounting.models import tiny
from tests.helpers import HAS_COMPILER

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("stage", "precision", "bytes_per_parameter"),
    [
        # Counted in DeepSpeed 0.19.8 on 2 ranks, as bytes per parameter: storages alive after backward.
        (0, "fp32", 16.0),
        (0, "bf16", 16.0),
        (1, "fp32", 14.0),
        (1, "bf16", 10.0),
        (2, "fp32", 12.0),
        (2, "bf16", 9.0),
        (3, "fp32", 10.0),
        (3, "bf16", 8.0),
    ],
)
def test_state_memory_is_what_deepspeed_holds_on_two_ranks(
    stage: int, precision: str, bytes_per_parameter: float
) -> None:
    zero = ZeroSettings(stage, precision, gradient_precision=precision)
    memory = accounting.state_memory(replicated=1 << 20, experts=0, world_size=2, ep_size=1, zero=zero)
    assert memory.states == bytes_per_parameter * (1 << 20)


def test_experts_are_divided_by_ep_and_partitioned_over_the_ranks_that_share_them() -> None:
    zero = ZeroSettings(3, "bf16", gradient_precision="bf16")
    memory = accounting.state_memory(replicated=1600, experts=6400, world_size=16, ep_size=4, zero=zero)
    part = 1600 // 16 + 6400 // 4 // 4
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * part, 2 * part, 12 * part)


def test_without_data_parallel_ranks_zero_leaves_an_expert_whole() -> None:
    zero = ZeroSettings(2, "bf16", gradient_precision="bf16")
    memory = accounting.state_memory(replicated=0, experts=800, world_size=8, ep_size=8, zero=zero)
    assert memory.states == 100 * (2 + 2 + 12)


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from([(1, 1), (4, 1), (8, 4), (64, 8)]))
def test_a_higher_zero_stage_never_holds_more(replicated: int, expert_units: int, ranks: tuple[int, int]) -> None:
    world_size, ep_size = ranks
    for precision in ("bf16", "fp16"):
        states = [
            accounting.state_memory(
                replicated, expert_units * ep_size, world_size, ep_size, ZeroSettings(stage, precision, precision)
            ).states
            for stage in range(4)
        ]
        assert states == sorted(states, reverse=True)


def document(**deepspeed: Any) -> dict[str, Any]:
    mode = {"model": tiny().model.to_dict()}
    return {"train_batch_size": 4, "mode": mode, **deepspeed}


def test_memory_adds_states_and_activations_of_the_configured_stage() -> None:
    run = run_config_from_dict(
        document(zero_optimization={"stage": 2, "reduce_bucket_size": 5e2}, bf16={"enabled": True})
    )
    memory = accounting.memory_per_rank(run, world_size=2)
    counts = accounting.expected_counts(run.mode, rows=2)
    assert memory.buffers == 500 * 2
    assert memory.activations == accounting.activation_bytes(run.mode, counts, element_size=2)
    assert memory.logits == 2 * 8 * 10 * (2 + 12)
    assert memory.total == memory.states + 1000 + memory.activations + memory.logits
    assert accounting.memory_per_rank(run, world_size=2, zero_stage=0).parameters == 2 * accounting.num_parameters(
        run.mode
    )


@pytest.mark.parametrize(
    ("deepspeed", "path"),
    [
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "large"}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": -1}}, "stage3_max_live_parameters"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtype": ["fp32"]}}, "data_types.grad_accum_dtype"),
        ({"data_types": []}, "data_types"),
    ],
)
def test_a_deepspeed_setting_without_meaning_is_a_config_error(deepspeed: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        accounting.memory_per_rank(run_config_from_dict(document(**deepspeed)), world_size=1)


def test_checkpointing_keeps_block_inputs_and_one_block() -> None:
    config = tiny()
    counts = accounting.expected_counts(config, rows=3)
    one = accounting.block_activation_bytes(config, 0, counts[0], 4)
    assert accounting.activation_bytes(config, counts, 4) == 2 * one
    model = dataclasses.replace(config.model, activation_checkpointing=True)
    checkpointed = dataclasses.replace(config, model=model)
    assert accounting.activation_bytes(checkpointed, counts, 4) == 2 * 3 * 8 * 8 * 4 + one


def estimated_and_counted(config: ModeConfig, masking: bool) -> float:
    """The estimate by what autograd saves of a forward pass."""
    data = dataclasses.replace(config.data, document_masking=masking)
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, sequence_length=512))
    model = ModeTransformer(config)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # by storage: many saved tensors are views of one

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(config.model.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(512).expand(2, -1) // 200 if masking else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(ids, documents=documents)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    return accounting.activation_bytes(config, [record.counts() for record in out.routing], element_size=4) / counted


@pytest.mark.parametrize("name", ["dense", "moe", "mode"])
@pytest.mark.parametrize("masking", [False, True], ids=["one document", "masked documents"])
def test_the_activation_estimate_is_near_what_autograd_saves(
    name: str, masking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(ROOT / "ds_configs" / f"{name}.json")
    compiled = estimated_and_counted(config, masking)
    monkeypatch.setattr(operators, "can_use_kernels", lambda *tensors: False)
    in_torch = estimated_and_counted(config.with_backend("grouped_mm") if config.experts else config, masking)
    assert 0.9 < in_torch < 1.1
    assert (in_torch < compiled) == HAS_COMPILER and compiled < 1.3  # the compiled kernels of a CPU save less
