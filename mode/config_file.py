"""The configuration file: our `"mode"` section beside DeepSpeed's settings, in one JSON.

Reads and splits the file, and checks what must hold between the two halves. Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mode.config import RUN_LENGTHS, ModeConfig, exact
from mode.section import ConfigError, Section, choice, integer, number, show


@dataclass(frozen=True)
class EngineConfig(Section):
    """What accounting and the trainer need to know of DeepSpeed's own settings."""

    micro_batch_size: int | None = integer(None, null=True)
    accumulation_steps: int | None = integer(None, null=True)
    train_batch_size: int | None = integer(None, null=True)
    zero_stage: int = integer(0, low=0, high=3)
    gradient_clipping: float = number(0.0, at_least=0)
    precision: str = choice("fp32", of=("fp32", "bf16", "fp16"))

    def check(self) -> None:
        if self.micro_batch_size is None and self.train_batch_size is None:
            raise ConfigError(
                "train_micro_batch_size_per_gpu", "is missing; give it, or train_batch_size, as a whole number"
            )

    def batch_layout(self, world_size: int) -> tuple[int, int]:
        """(rows per rank and micro-batch, micro-batches per step), as DeepSpeed works them out."""
        micro, steps, batch = self.micro_batch_size, self.accumulation_steps, self.train_batch_size
        if batch is None:
            assert micro is not None
            return micro, steps or 1
        if micro is None:
            micro = batch // (world_size * (steps or 1))
        if steps is None:
            steps = batch // (world_size * micro) if micro else 0
        if micro * steps * world_size != batch:
            given = [
                f"{name} = {value}"
                for name, value in (
                    ("train_micro_batch_size_per_gpu", self.micro_batch_size),
                    ("gradient_accumulation_steps", self.accumulation_steps),
                )
                if value is not None
            ]
            raise ConfigError(
                "train_batch_size",
                f"is {batch}, which does not divide into {world_size} ranks"
                + (f" with {' and '.join(given)}" if given else "")
                + "; make it rows per micro-batch x micro-batches x ranks",
            )
        return micro, steps


@dataclass(frozen=True)
class RunConfig:
    """A whole configuration file: our section, and DeepSpeed's settings untouched."""

    mode: ModeConfig
    engine: EngineConfig
    deepspeed: dict[str, Any]


# Top-level keys of DeepSpeed's JSON. DeepSpeed ignores a key it does not know without a word, so a
# key that is unknown here and close to one of these is taken for a slip of the pen.
DEEPSPEED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "zero_optimization",
    "gradient_clipping",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "flops_profiler",
    "activation_checkpointing",
    "comms_logger",
    "communication_data_type",
    "zero_allow_untested_optimizer",
    "seed",
    "checkpoint",
    "data_types",
    "elasticity",
    "autotuning",
    "aio",
    "amp",
    "torch_autocast",
    "compile",
    "managed_gradient_accumulation",
    "gradient_allreduce_op",
    "disable_allgather",
    "disable_python_gc",
    "dataloader_drop_last",
    "log_level",
    "use_data_before_expert_parallelism",
    "zero_force_ds_cpu_optimizer",
    "pipeline",
    "hybrid_engine",
    "curriculum_learning",
    "data_efficiency",
    "compression_training",
    "memory_breakdown",
    "nebula",
    "checkpoint_writer",
)


def load_config(path: str | Path) -> ModeConfig:
    """The `"mode"` section of a DeepSpeed JSON file, or `ConfigError`."""
    return load_run_config(path).mode


def load_run_config(path: str | Path) -> RunConfig:
    """A whole DeepSpeed JSON file, or `ConfigError`."""
    try:
        return run_config_from_dict(read_json(path))
    except ConfigError as error:
        raise error.in_file(str(path)) from None


def read_json(path: str | Path) -> Any:
    """A JSON file in which every key stands once. `ConfigError` says what is wrong with it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for index, (key, _) in enumerate(pairs):
            if key in dict(pairs[:index]):
                raise ConfigError(key, "stands twice in one JSON object; keep one of the two")
        return dict(pairs)

    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError("file", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("file", "is not UTF-8 text; it must be a JSON file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            "file", f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("file", f"is not usable JSON: {error}") from None


def override(document: Any, setting: str) -> None:
    """Applies `a.b.c=value` to a parsed JSON file. The value is JSON where it can be read so, else text."""
    path, equals, written = setting.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", f"is {show(setting)}; it must look like mode.train.steps=20")
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        value = written
    here = document
    for depth, key in enumerate(keys[:-1]):
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key] if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise ConfigError("--set", f"{setting}: {'.'.join(keys[: depth + 1])} is {show(here)}, not a JSON object")
    if keys[:-1] == ["mode", "train"] and keys[-1] in RUN_LENGTHS and value is not None:
        here.update(dict.fromkeys(RUN_LENGTHS))  # a length given here replaces the file's, whichever it was
    here[keys[-1]] = value


def run_config_from_dict(document: Any) -> RunConfig:
    """The parsed JSON file, split into our section and DeepSpeed's settings, both checked."""
    if not isinstance(document, dict):
        raise ConfigError("file", f"is {show(document)}; it must be a JSON object")
    for key in document:
        _check_top_level(str(key))
    if not isinstance(document.get("mode"), dict):
        raise ConfigError(
            "mode", f"is {show(document.get('mode'))}; it must be a JSON object: the section for this model"
        )
    try:
        config = ModeConfig.from_dict(document["mode"])
    except ConfigError as error:
        raise error.under("mode") from None
    deepspeed = {key: value for key, value in document.items() if key != "mode"}
    engine = _read_engine(deepspeed)
    _check_backend_precision(config, engine)
    _check_expert_capacity(config, engine)
    return RunConfig(config, engine, deepspeed)


def _check_top_level(key: str) -> None:
    """DeepSpeed ignores a key it does not know without a word, so a slip of the pen must be an error here.

    A key that resembles nothing is let through: a newer DeepSpeed may know it.
    """
    if key in ("mode", *DEEPSPEED_KEYS):
        return
    if key in {field.name for field in dataclasses.fields(ModeConfig)}:
        raise ConfigError(key, 'stands beside "mode", where nobody reads it; move it into the "mode" section')
    near = difflib.get_close_matches(key.lower(), ["mode", *DEEPSPEED_KEYS], n=1, cutoff=0.75)
    if near or not key.strip():
        meant = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(key or '""', f"unknown key, which DeepSpeed would ignore{meant}")


def _read_engine(deepspeed: dict[str, Any]) -> EngineConfig:
    for name in ("optimizer", "scheduler", "tensorboard", "csv_monitor", "wandb", "comet"):
        if not isinstance(deepspeed.get(name, {}), dict):
            raise ConfigError(name, f"is {show(deepspeed[name])}; it must be a JSON object, or be left out")
    job_name = deepspeed.get("tensorboard", {}).get("job_name", "run")
    if not isinstance(job_name, str) or not job_name.strip():
        raise ConfigError("tensorboard.job_name", f"is {show(job_name)}; it must be a non-empty string")
    json_paths = {
        "micro_batch_size": "train_micro_batch_size_per_gpu",
        "accumulation_steps": "gradient_accumulation_steps",
        "train_batch_size": "train_batch_size",
        "zero_stage": "zero_optimization.stage",
        "gradient_clipping": "gradient_clipping",
    }
    values: dict[str, Any] = {}
    for name, path in json_paths.items():
        value: Any = deepspeed
        for key in path.split("."):
            if not isinstance(value, dict):
                raise ConfigError(path.split(".")[0], f"is {show(value)}; it must be a JSON object")
            value = value.get(key, {} if key == "zero_optimization" else None)
        if value is not None:
            values[name] = value
    if "bfloat16" in deepspeed:
        raise ConfigError("bfloat16", 'is DeepSpeed\'s old name; write "bf16"')
    enabled = []
    for precision in ("bf16", "fp16"):
        part = deepspeed.get(precision, {})
        if not isinstance(part, dict) or not isinstance(part.get("enabled", False), bool) or "enable" in part:
            raise ConfigError(precision, f'is {show(part)}; it must be a JSON object with "enabled": true or false')
        if part.get("enabled", False):
            enabled.append(precision)
    if len(enabled) == 2:
        raise ConfigError("fp16.enabled", "is true while bf16.enabled is true; enable one of them")
    try:
        return EngineConfig(**values, precision=enabled[0] if enabled else "fp32")
    except ConfigError as error:
        raise ConfigError(json_paths.get(error.path, error.path), error.problem) from None


def _check_backend_precision(config: ModeConfig, engine: EngineConfig) -> None:
    if config.experts is not None and config.experts.backend == "megablocks" and engine.precision != "bf16":
        raise ConfigError(
            "mode.experts.backend",
            f'is "megablocks", which computes in bf16 only, in a run in {engine.precision}; set bf16.enabled to true, '
            'or use "auto"',
        )


def _check_expert_capacity(config: ModeConfig, engine: EngineConfig) -> None:
    """A capacity below one token means experts that can hardly ever work: an error, not a rounding."""
    experts = config.experts
    if experts is None or experts.capacity_factor is None:
        return
    rows = engine.micro_batch_size or engine.train_batch_size  # the latter: what one rank alone would hold
    assert rows is not None
    tokens = rows * config.model.sequence_length
    share = exact(experts.capacity_factor) * experts.top_k * (1 - exact(experts.no_op_fraction)) / experts.num_experts
    fraction = exact(config.depth.capacity_fraction) if config.depth is not None else Fraction(1)
    if share * tokens * fraction < 1:
        raise ConfigError(
            "mode.experts.capacity_factor",
            f"is {experts.capacity_factor:g}, which lets an expert take {float(share * tokens * fraction):g} of a "
            f"micro-batch's assignments; it must allow at least one: use {float(1 / (share * tokens * fraction)):.3g} "
            "times as much, a larger micro-batch, or null for dropless",
        )
