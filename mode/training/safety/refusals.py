"""DeepSpeed settings under which DeepSpeed 0.19.8 computes something else than it says, refused before training.

Each was seen on a CPU with 1 to 4 ranks: gradients, weights or checkpoints differed from one process's with
nothing to tell it. Settings that this list and `CHECKED` do not name have not been looked at; they are let through
with a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mode.config.section import ConfigError


@dataclass(frozen=True)
class Situation:
    """What a refusal can depend on."""

    zero: dict[str, Any]  # zero_optimization
    deepspeed: dict[str, Any]  # everything beside "mode"
    stage: int
    accumulation: int
    precision: str
    on_cpu: bool


@dataclass(frozen=True)
class Refusal:
    path: str
    applies: Callable[[Situation], bool]
    reason: str  # what goes wrong, and what to use instead


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return settings.get(name) or {}


def _accumulation(deepspeed: dict[str, Any], world_size: int) -> int:
    """Micro-batches per step, as DeepSpeed works them out."""
    names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    steps, batch, micro = (deepspeed.get(name) for name in names)
    if isinstance(steps, int):
        return steps
    return batch // (micro * world_size) if isinstance(batch, int) and isinstance(micro, int) else 1


def _fp32_accumulation_is_wrong(s: Situation) -> bool:
    asked = _section(s.deepspeed, "data_types").get("grad_accum_dtype") == "fp32"
    immediate = _section(s.deepspeed, "bf16").get("immediate_grad_update", False)
    return s.precision == "bf16" and s.stage == 1 and s.accumulation > 1 and asked and not immediate


REFUSALS = (
    Refusal(
        "zero_optimization.stage",
        lambda s: s.precision == "fp16" and s.stage == 0,
        "is 0 with fp16, under which experts are left out of the gradient norm; use 1 (on one rank it costs no more)",
    ),
    Refusal(
        "zero_optimization.round_robin_gradients",
        lambda s: s.stage in (1, 2) and bool(s.zero.get("round_robin_gradients")),
        "is true, under which a checkpoint that is exported or resumed on another layout has its weights scrambled; "
        "leave it out",
    ),
    Refusal(
        "zero_optimization.contiguous_gradients",
        lambda s: s.stage in (1, 2) and s.zero.get("contiguous_gradients") is False,
        "is false, under which expert gradients are scaled wrongly; leave it out",
    ),
    Refusal(
        "zero_optimization.overlap_comm",
        lambda s: s.stage == 1 and s.accumulation > 1 and bool(s.zero.get("overlap_comm")),
        "is true at stage 1 with gradient accumulation, under which gradients are wrong; leave it out, or use stage 2",
    ),
    Refusal(
        "data_types.grad_accum_dtype",
        _fp32_accumulation_is_wrong,
        "is fp32 with bf16 at stage 1 and gradient accumulation, under which earlier micro-batches count again; set "
        "bf16.immediate_grad_update to true, or use stage 2",
    ),
    Refusal(
        "zero_optimization.offload_optimizer",
        lambda s: s.on_cpu and _section(s.zero, "offload_optimizer").get("device", "none") != "none",
        "is set on a CPU, where it saves nothing and its gradients are wrong with accumulation; leave it out",
    ),
    Refusal(
        "managed_gradient_accumulation",
        lambda s: s.deepspeed.get("managed_gradient_accumulation") is False,
        "is false; the trainer counts on DeepSpeed's own accumulation: leave it out",
    ),
)

# Of zero_optimization: held to one process by tools/parity.py, or without influence on the result.
CHECKED = {
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_scatter",
    "sub_group_size",
    "round_robin_gradients",
    "offload_optimizer",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
}


def refuse_what_is_wrong(deepspeed: dict[str, Any], world_size: int, on_cpu: bool) -> list[str]:
    """Raises for a setting known to be wrong; returns the settings of zero_optimization nobody has checked.

    `deepspeed` is DeepSpeed's configuration. What DeepSpeed itself refuses is left to it.
    """
    zero = deepspeed.get("zero_optimization") or {}
    halves = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    precision = next((half for name, half in halves.items() if _section(deepspeed, name).get("enabled")), "fp32")
    accumulation = _accumulation(deepspeed, world_size)
    situation = Situation(zero, deepspeed, zero.get("stage", 0), accumulation, precision, on_cpu)
    for refusal in REFUSALS:
        if refusal.applies(situation):
            raise ConfigError(refusal.path, f"{refusal.reason} (seen with DeepSpeed 0.19.8)")
    return sorted(f"zero_optimization.{name}" for name in zero if name not in CHECKED)
