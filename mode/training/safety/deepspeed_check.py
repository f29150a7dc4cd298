"""Has DeepSpeed and torch judge DeepSpeed's half of the configuration, before data and process group are there.

What they say becomes a `ConfigError` with the path, the value, what is legal and the nearest name. Only settings are
involved here, so any exception is about a setting. Which names there are is checked by `mode.config.setting_names`.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import ADAM_W_MODE, DEEPSPEED_OPTIMIZERS, TORCH_ADAM_PARAM, DeepSpeedConfig, DtypeEnum
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError
from torch import nn, optim

from mode.config.section import ConfigError, nearest, show

NOT_HERE = ("Optimizer", "LBFGS", "SparseAdam")  # the second needs a closure and one group, the third sparse gradients
TORCH_OPTIMIZERS = tuple(
    name for name in dir(optim) if inspect.isclass(getattr(optim, name)) and name not in NOT_HERE and name[0] != "_"
)
TORCH_SCHEDULERS = tuple(name for name in optim.lr_scheduler.__all__ if name != "LRScheduler")
ADAM_SWITCHES = (TORCH_ADAM_PARAM, ADAM_W_MODE, "fp32_optimizer_states")  # DeepSpeed takes them before it builds one
MUON_PARAMETERS = (
    *DeepSpeedEngine._MUON_HALF_KEYS,
    *DeepSpeedEngine._ADAM_HALF_KEYS,
    *("muon_lr", "adam_lr", "per_head_muon", "foreach"),
)


def check_deepspeed_settings(settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for what DeepSpeed would refuse; `settings` are complete, as for `deepspeed.initialize`."""
    with _quiet():
        _check_sections(settings)
        _check_scalars(settings)
        optimizer = _check_optimizer(settings)
        _check_scheduler(settings, optimizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed warns again when the engine is built."""
    was, deepspeed_logger.disabled = deepspeed_logger.disabled, True
    try:
        yield
    finally:
        deepspeed_logger.disabled = was


# ---------------------------------------------------------------------------------------------------
# Sections


def _check_sections(settings: dict[str, Any]) -> None:
    # Without the sum, which holds for the number of ranks and not for this one process.
    settings = {key: value for key, value in settings.items() if key != "train_batch_size"}
    error = _refusal(settings)
    if error is None:
        return
    batch = {"train_micro_batch_size_per_gpu": settings["train_micro_batch_size_per_gpu"]}
    for key, value in settings.items():  # which of them is refused on its own?
        alone = _refusal({**batch, key: value})
        if str(alone) == str(error):
            raise _in_our_words(error, key, value)
    raise ConfigError("deepspeed", f"DeepSpeed refuses these settings together: {reason(error)}")


def _refusal(settings: dict[str, Any]) -> Exception | None:
    try:
        DeepSpeedConfig(settings)
    except Exception as error:  # whatever it is, it comes from reading settings
        return error
    return None


def _in_our_words(error: Exception, key: str, value: Any) -> ConfigError:
    if not isinstance(error, ValidationError):
        return ConfigError(key, f"is {show(value)}; DeepSpeed refuses it: {reason(error)}")
    first = error.errors()[0]
    inside = [str(part) for part in first["loc"]]
    path = ".".join(inside if inside[:1] == [key] else [key, *inside])  # monitors name their own section
    if first["type"] == "extra_forbidden":
        return ConfigError(path, f"unknown key; {nearest(inside[-1], _names_beside(error, inside))}")
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    return ConfigError(path, f"is {show(first['input'])}; {said}")


def _names_beside(error: ValidationError, inside: list[str]) -> list[str]:
    """The names that the section has in which `error` found an unknown one."""
    models = {model.__name__: model for model in (*DeepSpeedConfigModel.__subclasses__(), DeepSpeedConfigModel)}
    section: Any = models[error.title]
    for name in inside[:-1]:
        annotation = section.model_fields[name].annotation
        section = next(each for each in (annotation, *get_args(annotation)) if hasattr(each, "model_fields"))
    return sorted(section.model_fields)


def reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_scalars(settings: dict[str, Any]) -> None:
    """DeepSpeed reads these only while it builds the engine, or later."""
    every = settings.get("steps_per_print", 1)
    if isinstance(every, bool) or not isinstance(every, int | None) or every == 0:
        raise ConfigError("steps_per_print", f"is {show(every)}; it must be a whole number other than 0, or null")
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        value = settings.get("data_types", {}).get(name)
        legal = [each.name for each in DtypeEnum]
        if value is not None and value not in [other for each in DtypeEnum for other in each._all_values]:
            raise ConfigError(f"data_types.{name}", f"is {show(value)}; it must be one of {', '.join(legal)}")


# ---------------------------------------------------------------------------------------------------
# Optimizer and scheduler: one of each is built for a single weight


def _check_optimizer(settings: dict[str, Any]) -> optim.Optimizer:
    section = settings.get("optimizer")
    if not section or "type" not in section:
        legal = 'a DeepSpeed optimizer section, such as {"type": "AdamW", "params": {"lr": 0.001}}'
        raise ConfigError("optimizer", f"is {show(section)}; it must be {legal}")
    written, parameters = section["type"], section["params"]
    name = written.lower()
    if name not in DEEPSPEED_OPTIMIZERS and written not in TORCH_OPTIMIZERS:
        legal = f"one of {', '.join(DEEPSPEED_OPTIMIZERS)}, or a class of torch.optim: {', '.join(TORCH_OPTIMIZERS)}"
        raise _unknown_type("optimizer.type", written, legal, (*DEEPSPEED_OPTIMIZERS, *TORCH_OPTIMIZERS))
    if "max_grad_norm" in parameters:
        raise ConfigError("optimizer.params.max_grad_norm", 'is not for an optimizer; write "gradient_clipping"')
    offload = settings.get("zero_optimization", {}).get("offload_optimizer") or {}
    kind = _optimizer_class(name, written, parameters, on_cpu=offload.get("device", "none") != "none")
    if name in ("adam", "adamw", "muon"):
        parameters = {key: value for key, value in parameters.items() if key not in ADAM_SWITCHES}
    if kind is None:  # Muon: DeepSpeed makes its groups and ignores the rest
        _check_parameters("optimizer", written, parameters, MUON_PARAMETERS)
    else:
        switches = ADAM_SWITCHES if name in ("adam", "adamw") else ()
        _check_parameters("optimizer", written, parameters, _names(kind), switches)
    # DeepSpeed's own classes may compile when they are built; what torch's refuse in their place is wrong there too.
    build = kind if kind is not None and kind.__module__.startswith("torch.") else optim.AdamW
    known = {key: value for key, value in parameters.items() if key in _names(build)}
    return _try("optimizer", build, [nn.Parameter(torch.zeros(1))], known)


def _optimizer_class(name: str, written: str, parameters: dict[str, Any], on_cpu: bool) -> Any:
    """The class that DeepSpeed's engine would take; None for Muon, whose parameters are its engine's."""
    if name in ("adam", "adamw"):
        if parameters.get(TORCH_ADAM_PARAM):
            return optim.AdamW if name == "adamw" or parameters.get(ADAM_W_MODE, True) else optim.Adam
        return DeepSpeedCPUAdam if on_cpu else FusedAdam
    if name.startswith("mu") and name != "muon":
        if importlib.util.find_spec("mup") is None:
            raise ConfigError("optimizer.type", f'is "{written}", which needs the package mup: pip install mup')
        mup = importlib.import_module("mup")
        return {"muadam": mup.MuAdam, "muadamw": mup.MuAdamW, "musgd": mup.MuSGD}[name]
    own = {
        "adagrad": DeepSpeedCPUAdagrad if on_cpu else optim.Adagrad,
        "lamb": FusedLamb,
        "lion": DeepSpeedCPULion if on_cpu else FusedLion,
        "muon": None,
    }
    return own[name] if name in own else getattr(optim, written)


def _check_scheduler(settings: dict[str, Any], optimizer: optim.Optimizer) -> None:
    section = settings.get("scheduler", {})
    if "type" not in section:
        return
    name, parameters = section["type"], section["params"]
    names = (*lr_schedules.VALID_LR_SCHEDULES, *TORCH_SCHEDULERS)
    if name not in names:
        legal = f"one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)}, or a class of torch.optim.lr_scheduler"
        raise _unknown_type("scheduler.type", name, f"{legal}: {', '.join(TORCH_SCHEDULERS)}", names)
    kind = getattr(lr_schedules if name in lr_schedules.VALID_LR_SCHEDULES else optim.lr_scheduler, name)
    _check_parameters("scheduler", name, parameters, _names(kind))
    required = [
        each.name
        for each in list(inspect.signature(kind).parameters.values())[1:]
        if each.default is inspect.Parameter.empty and each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for each in required:
        if each not in parameters:
            raise ConfigError(f"scheduler.params.{each}", f"is missing; {name} needs it")
    _try("scheduler", kind, optimizer, parameters)


def _names(kind: Any) -> tuple[str, ...]:
    """What a class takes beside the parameters or the optimizer."""
    return tuple(inspect.signature(kind).parameters)[1:]


def _unknown_type(path: str, value: Any, legal: str, names: tuple[str, ...]) -> ConfigError:
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
    meant = f'; did you mean "{by_lower[near[0]]}"?' if near else ""
    return ConfigError(path, f"is {show(value)}; it must be {legal}{meant}")


def _check_parameters(
    section: str, kind: str, given: dict[str, Any], names: tuple[str, ...], switches: tuple[str, ...] = ()
) -> None:
    for name, value in given.items():
        if name not in names:
            known = nearest(name, sorted({*names, *switches}))
            raise ConfigError(
                f"{section}.params.{name}", f"is {show(value)}, but {kind} takes no such setting; {known}"
            )


def _try(section: str, kind: Any, first: Any, parameters: dict[str, Any]) -> Any:
    """Builds; a setting is to blame if all is well without it, or with 1 in its place."""
    try:
        return kind(first, **parameters)
    except Exception as error:
        for name, value in parameters.items():
            without = {key: each for key, each in parameters.items() if key != name}
            if _builds(kind, first, without) or _builds(kind, first, {**without, name: 1}):
                default = inspect.signature(kind).parameters[name].default
                like = "" if default in (inspect.Parameter.empty, None) else f"; its default is {show(default)}"
                path = f"{section}.params.{name}"
                raise ConfigError(path, f"is {show(value)}, which is refused: {reason(error)}{like}") from None
        refused = f"is {show(parameters)}, which is refused: {reason(error)}"
        raise ConfigError(f"{section}.params", refused) from None


def _builds(kind: Any, first: Any, parameters: dict[str, Any]) -> bool:
    try:
        kind(first, **parameters)
    except Exception:
        return False
    return True
