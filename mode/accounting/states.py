"""Bytes one rank holds for parameters, gradients and optimizer, by ZeRO stage.

What is counted here was read in DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py,
runtime/fp16, runtime/engine.py) for an Adam optimizer without offloading:

  stage  parameters        gradients                    optimizer states
  0      all               all                          2 fp32 moments; an fp32 master copy if 16-bit
  1      all               all, until they are reduced  fp32 copy of this rank's part, 2 moments of it
  2      all               this rank's part             the same
  3      this rank's part  this rank's part             the same

From stage 1 on the fp32 copy exists for fp32 models too. Gradients have the data type of the parameters
unless `data_types.grad_accum_dtype` says otherwise. An expert lives on world_size / ep_size ranks and is
partitioned over those; everything else is partitioned over all ranks. Padding, at most a few elements
per rank and parameter, is left out.

This file knows numbers of parameters; it does not know which model has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mode.config.file import RunConfig
from mode.config.section import ConfigError, show

ELEMENT_SIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = ELEMENT_SIZE["fp32"]
ALLREDUCE_ELEMENTS = 500_000_000  # stage 0: how many gradients are flattened for one all-reduce, at most


@dataclass(frozen=True)
class ZeroSettings:
    """The settings of DeepSpeed that decide how much it holds, with DeepSpeed's own defaults."""

    stage: int = 0
    precision: str = "fp32"
    gradient_precision: str = "fp32"
    bucket_elements: int = 500_000_000  # reduce_bucket_size; allocated whole, however small the model
    overlap_comm: bool = False  # a second bucket, at stages 1 and 2
    max_live_elements: int = 1_000_000_000  # stage3_max_live_parameters

    @classmethod
    def read(cls, run: RunConfig) -> ZeroSettings:
        """From a configuration file; `ConfigError` for a value that has no meaning."""
        precision = run.engine.precision
        zero = _part(run.deepspeed, "zero_optimization")
        gradient_precision = _part(run.deepspeed, "data_types").get("grad_accum_dtype") or precision
        if not isinstance(gradient_precision, str) or gradient_precision not in ELEMENT_SIZE:
            legal = ", ".join(f'"{name}"' for name in ELEMENT_SIZE)
            raise ConfigError(
                "data_types.grad_accum_dtype", f"is {show(gradient_precision)}; it must be one of {legal}"
            )
        return cls(
            stage=run.engine.zero_stage,
            precision=precision,
            gradient_precision=gradient_precision,
            bucket_elements=_elements(zero, "reduce_bucket_size", cls.bucket_elements),
            overlap_comm=zero.get("overlap_comm") is True,
            max_live_elements=_elements(zero, "stage3_max_live_parameters", cls.max_live_elements),
        )


def _part(deepspeed: dict[str, Any], name: str) -> dict[str, Any]:
    value = deepspeed.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(name, f"is {show(value)}; it must be a JSON object")
    return value


def _elements(part: dict[str, Any], name: str, default: int) -> int:
    value = part.get(name, default)
    if isinstance(value, float) and value.is_integer():  # 5e8 is how DeepSpeed's examples write it
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"zero_optimization.{name}", f"is {show(value)}; it must be a whole number of at least 0")
    return value


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. The first three are exact but for padding; the rest are estimates."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int  # at most: reduction buckets, and at stage 3 the parameters gathered for use
    step_copy: int  # fp32 gradients made for the optimizer step, when no activations are left
    activations: int = 0
    logits: int = 0

    @property
    def states(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak: either in backward or in the optimizer step."""
        return self.states + self.buffers + max(self.activations + self.logits, self.step_copy)


def state_memory(replicated: int, experts: int, world_size: int, ep_size: int, zero: ZeroSettings) -> RankMemory:
    """Memory without activations: `replicated` parameters every rank has, `experts` divided over `ep_size` ranks."""
    assert world_size % ep_size == 0 and experts % ep_size == 0
    local = replicated + experts // ep_size
    part = ceil_div(replicated, world_size) + ceil_div(experts // ep_size, world_size // ep_size)
    parameter_size, gradient_size = ELEMENT_SIZE[zero.precision], ELEMENT_SIZE[zero.gradient_precision]

    updated = local if zero.stage == 0 else part  # what this rank's optimizer updates
    has_copy = zero.stage > 0 or zero.precision != "fp32"
    if zero.stage == 0:
        buffers = min(local, ALLREDUCE_ELEMENTS) * gradient_size if world_size > 1 else 0
    elif zero.stage < 3:
        buffers = zero.bucket_elements * gradient_size * (2 if zero.overlap_comm else 1)
    else:
        buffers = zero.bucket_elements * gradient_size + min(local, zero.max_live_elements) * parameter_size
    return RankMemory(
        parameters=(part if zero.stage == 3 else local) * parameter_size,
        gradients=(part if zero.stage >= 2 else local) * gradient_size,
        optimizer=updated * FP32 * (3 if has_copy else 2),
        buffers=buffers,
        step_copy=updated * FP32 if has_copy else 0,
    )


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)
