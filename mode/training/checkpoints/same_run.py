"""Refuses to resume a different run.

A checkpoint of another model, corpus or batch is never gone on with. One whose length, optimizer settings or schedule
were planned otherwise is gone on with only when asked to (`--extend`), and the run then keeps a record of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mode.config.file import RunConfig
from mode.config.section import ConfigError, show
from mode.config.settings import RUN_LENGTHS
from mode.data import PackedData
from mode.runs import tree_differences
from mode.training.checkpoints.checkpoint import run_of, step_of

AFRESH = "start afresh with --resume never or another --output_dir"
STEPS = "mode.train.steps"
NOT_THE_PLAN = ("torch_adam",)  # optimizer parameters that choose an implementation, not an update


def identity(run: RunConfig, data: PackedData, global_rows: int) -> dict[str, Any]:
    """What must not change between the parts of one run, because it would be another run."""
    mode = run.mode.to_dict()
    mode.pop("train")
    mode.pop("description")
    mode["model"].pop("activation_checkpointing")
    mode["data"].pop("cache_dir")
    if mode["depth"] is not None:
        mode["depth"].pop("causal")
    if mode["experts"] is not None:
        mode["experts"].pop("backend")
        mode["experts"].pop("ep_size")
    corpus = {"train": asdict(data.train.counts), "validation": asdict(data.validation.counts)}
    optimizer = run.deepspeed.get("optimizer", {}).get("type")
    return {"mode": mode, "train_batch_size": global_rows, "corpus": corpus, "optimizer.type": optimizer}


def plan(run: RunConfig, num_steps: int) -> dict[str, Any]:
    """What the schedules and the updates of a run follow. `length` is as it was set, by steps, tokens or FLOPs."""
    parameters = run.deepspeed.get("optimizer", {}).get("params", {})
    return {
        "length": {name: getattr(run.mode.train, name) for name in RUN_LENGTHS},
        STEPS: num_steps,
        "optimizer.params": {name: value for name, value in parameters.items() if name not in NOT_THE_PLAN},
        "scheduler": run.deepspeed.get("scheduler"),
        "gradient_clipping": run.engine.gradient_clipping,
    }


def check_same_run(found: Path, identity: dict[str, Any]) -> None:
    """Refuses a checkpoint of another run, naming the first difference. A section that is null is a difference, too."""
    saved = run_of(found)
    trees = {"now": identity, "then": {name: saved.get(name) for name in identity}}
    for path, values in tree_differences(trees):
        raise ConfigError(
            path, f"is {show(values['now'])} but {show(values['then'])} in {found}; set it back, or {AFRESH}"
        )


def check_plan(found: Path, plan: dict[str, Any], extend: bool) -> dict[str, Any]:
    """{setting: [value then, value now]} of a plan that is another than the checkpoint's; refused without `extend`.

    Fewer steps than the run already has are refused either way.
    """
    then, step = run_of(found).get("plan") or {}, step_of(found)
    same_length = then.get("length") == plan["length"]  # by FLOPs, another layout may round to another number of steps
    if plan[STEPS] < step and not same_length:
        raise ConfigError(STEPS, f"is {plan[STEPS]}, but {found} has {step} already; train as many, or {AFRESH}")
    trees = {"now": plan, "then": {name: then.get(name) for name in plan}}
    changes = {
        path: [values["then"], values["now"]]
        for path, values in tree_differences(trees)
        if not path.startswith("length") and not (path == STEPS and same_length)
    }
    if changes and not extend:
        path, (before, now) = next(iter(changes.items()))
        raise ConfigError(
            path,
            f"is {show(now)} but {show(before)} in {found}; set it back, or {AFRESH}, or go on with schedules that "
            "are planned anew by --extend. To end a part of a run without another plan, set mode.train.stop_after",
        )
    return changes


def extensions_of(found: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Where and how the plan of a run that goes on from `found` with `changes` became another, first to last."""
    now = [{"step": step_of(found), "changes": changes}] if changes else []
    return [*run_of(found).get("extensions", []), *now]


@contextmanager
def replanned(engine: Any, found: Path, changes: dict[str, Any]) -> Iterator[None]:
    """Loads `found` inside: with `changes`, the engine keeps its own optimizer settings and schedule, at that step."""
    if not changes:
        yield
        return
    groups = engine.optimizer.param_groups
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None  # the saved one follows the plan of then
    yield
    engine.lr_scheduler = scheduler
    for group, planned in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(planned)
    if scheduler is not None:
        done = step_of(found)
        scheduler.step(done - 1 if hasattr(scheduler, "last_batch_iteration") else done)  # torch's count from 1


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested dictionaries."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return found
