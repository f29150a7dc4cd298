"""DeepSpeed settings that would train something else are refused, and only where they would."""

from __future__ import annotations

from typing import Any

import pytest

from mode.config.section import ConfigError
from mode.training.safety.refusals import refuse_what_is_wrong

BF16 = {"bf16": {"enabled": True}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def refuse(settings: dict[str, Any], stage: int = 1, accumulation: int = 1, **zero: Any) -> list[str]:
    zero_settings = {"zero_optimization": {"stage": stage, **zero}}
    layout = {"train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    return refuse_what_is_wrong(layout | zero_settings | settings, world_size=1, on_cpu=True)


@pytest.mark.parametrize(
    ("path", "settings", "stage", "accumulation", "zero"),
    [
        ("zero_optimization.stage", {"fp16": {"enabled": True}}, 0, 1, {}),
        ("zero_optimization.round_robin_gradients", {}, 1, 1, {"round_robin_gradients": True}),
        ("zero_optimization.round_robin_gradients", {}, 2, 1, {"round_robin_gradients": True}),
        ("zero_optimization.contiguous_gradients", {}, 1, 1, {"contiguous_gradients": False}),
        ("zero_optimization.overlap_comm", {}, 1, 2, {"overlap_comm": True}),
        ("data_types.grad_accum_dtype", BF16 | FP32_SUMS, 1, 2, {}),
        ("zero_optimization.offload_optimizer", {}, 2, 1, {"offload_optimizer": {"device": "cpu"}}),
        ("managed_gradient_accumulation", {"managed_gradient_accumulation": False}, 1, 1, {}),
    ],
)
def test_a_setting_known_to_be_wrong_is_refused_by_name(
    path: str, settings: dict[str, Any], stage: int, accumulation: int, zero: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        refuse(settings, stage, accumulation, **zero)
    assert str(error.value).startswith(f"{path}: is ") and "0.19.8" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "stage", "accumulation", "zero"),
    [
        ({}, 0, 2, {}),
        (BF16, 0, 2, {}),
        ({}, 1, 1, {"overlap_comm": True}),
        ({}, 2, 2, {"overlap_comm": True}),
        ({}, 3, 2, {"round_robin_gradients": True}),
        (BF16 | FP32_SUMS, 1, 1, {}),
        (BF16 | FP32_SUMS, 2, 2, {}),
        ({"bf16": {"enabled": True, "immediate_grad_update": True}} | FP32_SUMS, 1, 2, {}),
        ({}, 2, 1, {"offload_optimizer": {"device": "none"}}),
    ],
)
def test_what_is_right_is_let_through(
    settings: dict[str, Any], stage: int, accumulation: int, zero: dict[str, Any]
) -> None:
    assert refuse(settings, stage, accumulation, **zero) == []


def test_a_setting_nobody_has_checked_is_named() -> None:
    assert refuse({}, 3, zero_hpz_partition_size=2) == ["zero_optimization.zero_hpz_partition_size"]
