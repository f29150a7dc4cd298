"""The configuration file: our `"mode"` section beside DeepSpeed's settings, in one JSON.

Reads and splits the file, and checks what must hold between the two halves. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mode.config.deepspeed_settings import SETTINGS
from mode.config.section import ConfigError, Section, choice, integer, number, show
from mode.config.setting_names import check_name, check_names
from mode.config.settings import RUN_LENGTHS, ModeConfig, exact


@dataclass(frozen=True)
class EngineConfig(Section):
    """What accounting and the trainer need to know of DeepSpeed's own settings."""

    micro_batch_size: int | None = integer(None, null=True, high=2**24)
    accumulation_steps: int | None = integer(None, null=True, high=2**24)
    train_batch_size: int | None = integer(None, null=True, high=2**24)
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


MAX_NESTING = 50  # levels of JSON; what copies or prints a document goes down one call or more for each


def load_config(path: str | Path) -> ModeConfig:
    """The `"mode"` section of a DeepSpeed JSON file, or `ConfigError`."""
    return load_run_config(path).mode


def load_run_config(path: str | Path, settings: Iterable[str] = ()) -> RunConfig:
    """A whole DeepSpeed JSON file with `settings`, such as "mode.train.steps=20", put in place; or `ConfigError`."""
    try:
        document = read_json(path)
        for setting in settings:
            override(document, setting)
        return run_config_from_dict(document)
    except ConfigError as error:
        raise error.in_file(str(path)) from None


def read_json(path: str | Path) -> Any:
    """A JSON file in which every key stands once. `ConfigError` says what is wrong with it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(key, "stands twice in one JSON object; keep one of the two")
            found[key] = value
        return found

    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError("file", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("file", "is not UTF-8 text; it must be a JSON file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            "file", f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError("file", f"is nested too deeply; it may have {MAX_NESTING} levels") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("file", f"is not usable JSON: {error}") from None
    _check_nesting(document)
    return document


def _check_nesting(document: Any) -> None:
    level = [document]
    for _ in range(MAX_NESTING):
        inner = [value for value in level if isinstance(value, dict | list)]
        level = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(value, dict | list) for value in level):
        raise ConfigError("file", f"is nested too deeply; it may have {MAX_NESTING} levels")


def override(document: Any, setting: str) -> None:
    """Applies `a.b.c=value` to a parsed JSON file. The value is JSON where it can be read so, else text."""
    path, equals, written = setting.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", f"is {show(setting)}; it must look like mode.train.steps=20")
    if isinstance(document, dict):
        check_name(tuple(keys), document)
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
    _check_nesting(document)
    check_names(document)
    if "mode" not in document:
        raise ConfigError("mode", 'the section is missing; add the JSON object "mode" with model, data and train')
    if not isinstance(document["mode"], dict):
        raise ConfigError("mode", f"is {show(document['mode'])}; it must be a JSON object: the section for this model")
    try:
        config = ModeConfig.from_dict(document["mode"])
    except ConfigError as error:
        raise error.under("mode") from None
    deepspeed = {key: value for key, value in document.items() if key != "mode"}
    engine = _read_engine(deepspeed)
    _check_backend_precision(config, engine)
    _check_expert_capacity(config, engine)
    return RunConfig(config, engine, deepspeed)


def _read_engine(deepspeed: dict[str, Any]) -> EngineConfig:
    precision = _read_precision(deepspeed)
    for name, value in deepspeed.items():
        if SETTINGS[name] and not isinstance(value, dict):
            raise ConfigError(name, f"is {show(value)}; it must be a JSON object, or be left out")
    for name in ("optimizer", "scheduler"):
        kind, parameters = (
            deepspeed.get(name, {}).get(key, default) for key, default in (("type", ""), ("params", {}))
        )
        if not isinstance(kind, str):
            raise ConfigError(f"{name}.type", f"is {show(kind)}; it must be a string")
        if not isinstance(parameters, dict):
            raise ConfigError(f"{name}.params", f"is {show(parameters)}; it must be a JSON object")
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
        key, _, inner = path.partition(".")
        value = deepspeed.get(key, {}).get(inner) if inner else deepspeed.get(key)
        if value is not None:
            values[name] = value
    try:
        return EngineConfig(**values, precision=precision)
    except ConfigError as error:
        raise ConfigError(json_paths.get(error.path, error.path), error.problem) from None


def _read_precision(deepspeed: dict[str, Any]) -> str:
    if "bfloat16" in deepspeed:
        raise ConfigError("bfloat16", 'is DeepSpeed\'s old name; write "bf16"')
    enabled = []
    for precision in ("bf16", "fp16"):
        part = deepspeed.get(precision, {})
        if not isinstance(part, dict) or not isinstance(part.get("enabled", False), bool):
            raise ConfigError(precision, f'is {show(part)}; it must be a JSON object with "enabled": true or false')
        if part.get("enabled", False):
            enabled.append(precision)
    if len(enabled) == 2:
        raise ConfigError("fp16.enabled", "is true while bf16.enabled is true; enable one of them")
    return enabled[0] if enabled else "fp32"


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
