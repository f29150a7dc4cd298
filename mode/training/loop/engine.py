"""Building the DeepSpeed engine: the one place that calls `deepspeed.initialize`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime import compiler
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed
from torch.distributed import DistNetworkError

from mode import accounting
from mode.config.file import RunConfig
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig
from mode.engine import initialize
from mode.local_ranks import free_port
from mode.moe.deepspeed import MoE
from mode.moe.experts import PREFERENCE, choose_backend
from mode.training.safety.deepspeed_check import check_deepspeed_settings, reason
from mode.training.safety.watchdog import Watchdog, lost_a_rank
from mode.transformer.model import ModeTransformer

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")
# Of a collective, where there is a watchdog: it ends a rank that waits in vain, and a slow save may keep one for hours.
WATCHED_TIMEOUT = timedelta(days=1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARMUP_SHARE = 0.1  # of the steps, where the scheduler's warm-up is "auto"


def _is_news(record: logging.LogRecord) -> bool:
    """DeepSpeed warns at every start that its own scheduler has not started yet."""
    return "before it has started" not in record.getMessage()


def start_process_group(watchdog: Watchdog | None = None) -> None:
    """Joins the launcher's process group; alone, when started as plain `python train.py`."""
    watchdog = watchdog or Watchdog(None, rank=0)
    deepspeed_logger.setLevel(logging.WARNING)
    deepspeed_logger.addFilter(_is_news)
    # DeepSpeed still calls collectives by the names that torch 2.13 deprecates.
    deprecated = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)
    # On CPUs DeepSpeed would compile a shared-memory all-reduce at the first start: a run needs no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in alone.items()})
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # collectives before the engine exists need it too
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    watchdog.progress(f"the start, joining {os.environ['WORLD_SIZE']} ranks at {address}")
    timeout = default_pg_timeout if watchdog.limit is None else WATCHED_TIMEOUT
    backend = get_accelerator().communication_backend_name()
    try:
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError("MASTER_PORT", f"{address} is in use; name another by deepspeed --master_port") from error


@contextlib.contextmanager
def process_group(watchdog: Watchdog) -> Iterator[None]:
    """Joins the launcher's process group and leaves it: a thread of gloo alive at exit can abort the interpreter."""
    start_process_group(watchdog)
    try:
        yield
    except BaseException as error:
        if not lost_a_rank(error):  # then the watchdog ends the process: leaving could wait for the lost rank
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def engine_settings(run: RunConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's part of the configuration, checked, with every "auto" filled in. Monitors are ours to write to."""
    settings = copy.deepcopy(run.deepspeed)
    micro, accumulation = run.engine.batch_layout(world_size)
    settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"] = micro, accumulation
    settings["train_batch_size"] = micro * accumulation * world_size
    if run.engine.zero_stage == 0:
        settings["gradient_clipping"] = 0.0  # ours to do: see clip_gradients
    steps = accounting.num_steps(run, world_size)
    automatic = {"total_num_steps": steps, "warmup_num_steps": max(1, round(WARMUP_SHARE * steps))}
    scheduler = settings.get("scheduler", {}).get("params", {})
    for name, value in automatic.items():
        if scheduler.get(name) == "auto":
            scheduler[name] = value
    for name in ("optimizer", "scheduler"):
        if isinstance(settings.get(name), dict) and "type" in settings[name]:
            settings[name].setdefault("params", {})  # left out, DeepSpeed would hand None to torch's classes
    check_deepspeed_settings(settings)
    return {name: value for name, value in settings.items() if name not in MONITORS}


def agreed_backend(run: RunConfig) -> tuple[str, str] | None:
    """(how all ranks compute the experts, why so), or None without experts. A collective.

    Where "auto" finds different things, all take what the rank that has least can do.
    """
    experts = run.mode.experts
    if experts is None:
        return None
    mine: tuple[str, str, str | None]
    try:
        widths = (run.mode.model.width, experts.width)
        mine = (*choose_backend(experts.backend, device(), DTYPES[run.engine.precision], widths), None)
    except ConfigError as error:
        mine = ("", "", error.problem)
    found: list[Any] = [mine] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    for rank, (_, _, problem) in enumerate(found):
        if problem is not None:
            raise ConfigError("mode.experts.backend", problem + (f" (rank {rank})" if len(found) > 1 else ""))
    least = max(range(len(found)), key=lambda rank: PREFERENCE.index(found[rank][0]))
    name, reason, _ = found[least]
    where = f" on rank {least}" if len({answer[0] for answer in found}) > 1 else ""
    return name, reason + where


def build_model(config: ModeConfig) -> ModeTransformer:
    """The model with this rank's experts only."""
    ep_size = 1 if config.experts is None else config.experts.ep_size
    _check_memory(config, ep_size)
    if config.experts is None:
        return ModeTransformer(config)
    world_size = distributed.get_world_size()
    if world_size % ep_size:
        raise ConfigError(
            "mode.experts.ep_size", f"is {ep_size}, which does not divide the {world_size} ranks; use a divisor"
        )
    return ModeTransformer(config, MoE)


def _check_memory(config: ModeConfig, ep_size: int) -> None:
    """Refuses a model whose weights alone, built in float32 on the host, are more than the machine's memory."""
    experts = accounting.num_expert_parameters(config)
    parameters = accounting.num_parameters(config) - experts + experts // ep_size
    needed, there = (
        accounting.ELEMENT_SIZE["fp32"] * parameters,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if needed > there:
        raise ConfigError(
            "mode.model",
            f"has {parameters:,} parameters on a rank, {needed / 1e9:,.1f} GB in float32, but the machine has "
            f"{there / 1e9:,.1f} GB; make it smaller, or mode.experts.ep_size larger (see tools/plan.py)",
        )


def build_engine(run: RunConfig, model: ModeTransformer, world_size: int, universal: bool = False) -> Any:
    """The engine around `model`, on this rank's device; `universal`: to load a checkpoint of another layout."""
    settings = engine_settings(run, world_size)
    if universal:
        settings["checkpoint"] = {**settings.get("checkpoint", {}), "load_universal": True}
    if settings["optimizer"]["type"].lower() != "muon":
        import_muon_uncompiled()
    try:
        engine, _, _, _ = initialize(model, settings)
    except (DeepSpeedConfigError, ValueError, AssertionError, NotImplementedError) as error:
        if not refuses_a_setting(error):
            raise
        raise ConfigError("deepspeed", f"DeepSpeed refused its part of the configuration: {reason(error)}") from error
    return engine


def refuses_a_setting(error: Exception) -> bool:
    """Whether DeepSpeed raised it itself, with words. All else is a defect and keeps its traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return bool(str(error)) and frame.f_globals["__name__"].startswith("deepspeed.")


def import_muon_uncompiled() -> None:
    """DeepSpeed imports Muon to see whether an optimizer is one, and Muon torch's compiler: a second of every start."""
    compile_it = compiler.compile
    compiler.compile = lambda *arguments, **options: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_it


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


# Dense bf16 / fp16 tensor-core peaks by the start of the device's name, for MFU.
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12, "NVIDIA B200": 2250e12}


def peak_flops(precision: str) -> float | None:
    """FLOP/s of one device where known: half precision on the listed GPUs."""
    if precision == "fp32" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for start, peak in PEAK_FLOPS.items() if name.startswith(start)), None)


def peak_memory(device: torch.device) -> float:
    """The most bytes that any rank has held at once since it began: of its GPU, or else of RAM. A collective."""
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device)
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    most = torch.tensor(float(held), dtype=torch.float64, device=device)
    distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
    return most.item()
