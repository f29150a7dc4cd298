"""The members of an experiment: one training run each, planned from configuration files and `mode.accounting`.

Knows no files but the configurations, and nothing of how a member is run.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from planning.figures import missed_budget

from mode import accounting
from mode.config.file import RunConfig, override, read_json, run_config_from_dict
from mode.config.section import ConfigError, show
from mode.config.settings import RUN_LENGTHS

NEARLY_EQUAL = 0.05  # training FLOPs that differ by less are called equal


@dataclass(frozen=True)
class Cost:
    """Expected, by `mode.accounting`."""

    parameters: int
    active_parameters: int
    flops_per_token: float  # of a forward pass
    steps: int
    tokens: int
    flops: int  # of the whole training


@dataclass(frozen=True)
class Member:
    name: str  # of its run directory
    config: str  # the configuration file's name without .json
    varied: dict[str, Any]  # value by dotted path
    size: str | None
    budget: float | None  # training FLOPs
    seed: int
    label: str  # the variant: the configuration and what was varied in it
    document: dict[str, Any]  # the whole configuration file
    run: RunConfig
    cost: Cost

    @property
    def point(self) -> tuple[str, str | None, float | None]:
        """What its other seeds share."""
        return self.label, self.size, self.budget

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "config", "label", "varied", "size", "budget", "seed")
        return {**{name: getattr(self, name) for name in names}, "plan": asdict(self.cost)}


# ---------------------------------------------------------------------------------------------------
# What the command line says


@dataclass(frozen=True)
class Vary:
    """Values that a setting takes in turn, in all configurations or in those named."""

    configs: tuple[str, ...]  # empty: all
    path: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Size:
    name: str  # LAYERSxWIDTH
    num_layers: int
    width: int
    settings: tuple[str, ...]  # PATH=VALUE for this size alone


def parse_vary(text: str) -> Vary:
    """[NAME,...:]PATH=VALUE,VALUE,... where values are JSON, or else text."""
    path, equals, written = text.partition("=")
    names, colon, inner = path.rpartition(":")
    configs = tuple(names.split(",")) if colon else ()
    if not equals or not written or not all((*inner.split("."), *configs)):
        raise ConfigError(
            "--vary", f"is {show(text)}; it must look like mode.depth.every=1,2 or mode:mode.depth.every=1,2"
        )
    values = _values(written)
    shown = [json.dumps(value) for value in values]
    if len(set(shown)) < len(shown):
        raise ConfigError("--vary", f"{text} names a value twice; name each once")
    return Vary(configs, inner, values)


def _values(written: str) -> tuple[Any, ...]:
    try:
        return tuple(json.loads(f"[{written}]"))
    except (ValueError, RecursionError):
        return tuple(_value(part) for part in written.split(","))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_size(text: str) -> Size:
    """LAYERSxWIDTH[,PATH=VALUE...]"""
    name, *settings = text.split(",")
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,6})", name)
    if match is None or not all("=" in setting for setting in settings):
        raise ConfigError(
            "--sizes",
            f"is {show(text)}; it must look like 4x128, or 8x256,optimizer.params.lr=0.002",
        )
    return Size(name, int(match[1]), int(match[2]), tuple(settings))


# ---------------------------------------------------------------------------------------------------
# Sizes


def resize(document: dict[str, Any], size: Size) -> None:
    """Sets layers and width; heads keep their width, and feed-forward and experts their share of the model's width.

    Key/value heads keep their share of the heads as nearly as a divisor can. Widths that are multiples of 8, which
    grouped products need, stay so.
    """
    model = document["mode"]["model"]
    before = model["width"]
    head_width = before // model["num_heads"]
    if size.width % head_width:
        raise ConfigError(
            "--sizes",
            f"{size.name} is {size.width} wide, no multiple of the {head_width} of a head "
            "(mode.model.width / mode.model.num_heads); use one",
        )
    heads = size.width // head_width
    share = Fraction(model["num_kv_heads"], model["num_heads"])
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    model["num_kv_heads"] = min(divisors, key=lambda count: (abs(count - share * heads), -count))
    model["num_layers"], model["width"], model["num_heads"] = size.num_layers, size.width, heads
    model["ffn_width"] = _scaled(model["ffn_width"], size.width, before)
    experts = document["mode"].get("experts")
    if experts is not None:
        experts["width"] = _scaled(experts["width"], size.width, before)
    for setting in size.settings:
        override(document, setting)


def _scaled(inner: int, width: int, before: int) -> int:
    step = 8 if inner % 8 == 0 else 1
    return max(step, round(Fraction(inner * width, before * step)) * step)


# ---------------------------------------------------------------------------------------------------
# Planning

BY_BUDGET = tuple(f"mode.train.{name}" for name in RUN_LENGTHS)
BY_SEED = ("mode.seed",)
BY_SIZE = (
    *(f"mode.model.{name}" for name in ("num_layers", "width", "num_heads", "num_kv_heads", "ffn_width")),
    "mode.experts.width",
)


def plan_members(
    files: Sequence[str],
    *,
    vary: Sequence[Vary] = (),
    settings: Sequence[str] = (),
    sizes: Sequence[Size | None] = (None,),
    budgets: Sequence[float | None] = (None,),
    seeds: Sequence[int | None] = (None,),
    world_size: int = 1,
) -> list[Member]:
    """Every configuration in all its variations, at every size and budget, with every seed."""
    configs = {Path(file).stem: file for file in files}
    if len(configs) < len(files):
        raise ConfigError("--config", "names two files of one name, which would share labels; copy one to another name")
    known = ", ".join(configs)
    for item in vary:
        for name in item.configs:
            if name not in configs:
                raise ConfigError("--vary", f"{name}:{item.path}: no --config is called {name}; known: {known}")
    for item in vary:
        _check_own(item, sizes, budgets, seeds)
    short = short_names([item.path for item in vary])
    members = []
    for config, file in configs.items():
        base = read_base(file, settings)
        own = [item for item in vary if not item.configs or config in item.configs]
        for item in own:
            _check_applies(item, base, config, file)
        chosen = itertools.product(*([(item.path, value) for value in item.values] for item in own))
        for pairs, budget, size, seed in itertools.product(list(chosen), budgets, sizes, seeds):
            members.append(_member(config, file, base, dict(pairs), short, size, budget, seed, world_size))
    names = [member.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError("the plan", f"has two members called {twice}; name every value, size, budget and seed once")
    return members


def read_base(file: str, settings: Sequence[str]) -> dict[str, Any]:
    """A configuration file with settings for all members, checked."""
    try:
        document = read_json(file)
        for setting in settings:
            override(document, setting)
        run_config_from_dict(document)
    except ConfigError as error:
        raise error.in_file(file) from None
    return document


def _check_own(
    item: Vary, sizes: Sequence[Size | None], budgets: Sequence[float | None], seeds: Sequence[int | None]
) -> None:
    """What another option sets for every member cannot be varied as well: the labels would lie."""
    taken = {"the budget": BY_BUDGET} if None not in budgets else {}
    taken |= {"--seeds": BY_SEED} if None not in seeds else {}
    taken |= {"--sizes": BY_SIZE} if None not in sizes else {}
    for option, paths in taken.items():
        if item.path in paths:
            raise ConfigError("--vary", f"{item.path} is set by {option}; leave one of the two out")


def _check_applies(item: Vary, base: dict[str, Any], config: str, file: str) -> None:
    """A path into a section that is null would switch the section on: another model than the file's."""
    run = run_config_from_dict(base)
    here: Any = {**run.deepspeed, "mode": run.mode.to_dict()}
    keys = item.path.split(".")
    for depth, key in enumerate(keys[:-1]):
        here = here.get(key) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            section = ".".join(keys[: depth + 1])
            raise ConfigError(
                "--vary",
                f"{item.path} does not apply to {config}, whose {section} is {show(here)}; say which configurations "
                f"it is for, as in NAME:{item.path}=...",
                file,
            )


def _member(
    config: str,
    file: str,
    base: dict[str, Any],
    varied: dict[str, Any],
    short: dict[str, str],
    size: Size | None,
    budget: float | None,
    seed: int | None,
    world_size: int,
) -> Member:
    parts = [f"{short[path]}={show_value(value)}" for path, value in varied.items()]
    name = "-".join([config, *parts])
    document = copy.deepcopy(base)
    try:
        if size is not None:
            resize(document, size)
            name += f"-{size.name}"
        for path, value in varied.items():
            override(document, f"{path}={json.dumps(value)}")
        if budget is not None:
            override(document, f"mode.train.flops={budget!r}")
            name += f"-{show_budget(budget)}"
        if seed is not None:
            document["mode"]["seed"] = seed
        run = run_config_from_dict(document)
        cost = cost_of(run, world_size)
    except ConfigError as error:
        raise error.in_file(f"{file} as {name}") from None
    return Member(
        name=re.sub(r"[^\w.=+-]", "_", f"{name}-seed{run.mode.seed}"),
        config=config,
        varied=varied,
        size=None if size is None else size.name,
        budget=budget,
        seed=run.mode.seed,
        label=" ".join([config, *parts]),
        document=document,
        run=run,
        cost=cost,
    )


def cost_of(run: RunConfig, world_size: int) -> Cost:
    rows, accumulation = run.engine.batch_layout(world_size)
    counts = accounting.expected_counts(run.mode, rows)
    steps = accounting.num_steps(run, world_size)
    return Cost(
        parameters=accounting.num_parameters(run.mode),
        active_parameters=round(sum(accounting.active_parameters(run.mode, counts).values())),
        flops_per_token=float(accounting.per_token(accounting.model_flops(run.mode, counts).forward, counts)),
        steps=steps,
        tokens=steps * rows * accumulation * world_size * run.mode.model.sequence_length,
        flops=accounting.run_flops(run, world_size, steps),
    )


def missed_budgets(members: Sequence[Member], world_size: int) -> list[str]:
    """A warning for every place of the experiment whose whole steps miss its budget by much; seeds share one."""
    places = {member.point: member for member in reversed(members)}
    missed = [(member.name, missed_budget(member.run, world_size)) for member in reversed(places.values())]
    return [f"{name}: {text}" for name, text in missed if text is not None]


def unequal_flops(members: Sequence[Member]) -> list[str]:
    """A warning where members without a budget are not trained with about the same FLOPs."""
    by_cost = sorted((member for member in members if member.budget is None), key=lambda member: member.cost.flops)
    if not by_cost or by_cost[-1].cost.flops <= by_cost[0].cost.flops * (1 + NEARLY_EQUAL):
        return []
    cheapest, dearest = by_cost[0], by_cost[-1]
    return [
        f"the members differ in training FLOPs, from {cheapest.cost.flops:.3e} ({cheapest.name}) to "
        f"{dearest.cost.flops:.3e} ({dearest.name}): their losses are not at equal compute; --flops gives all the same"
    ]


# ---------------------------------------------------------------------------------------------------
# Names


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The end of each dotted path, as long as it takes to tell it from the others."""
    return {path: next(end for end in _ends(path) if _stands_for_one(end, set(paths))) for path in paths}


def _ends(path: str) -> Iterator[str]:
    keys = path.split(".")
    return (".".join(keys[-length:]) for length in range(1, len(keys) + 1))


def _stands_for_one(end: str, paths: set[str]) -> bool:
    return end in paths or sum(path.endswith(f".{end}") for path in paths) == 1


def show_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def show_budget(budget: float) -> str:
    """5e+12 as 5e12."""
    return f"{budget:g}".replace("e+", "e")
