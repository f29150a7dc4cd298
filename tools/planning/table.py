"""A plan as a table, or two side by side."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from planning.figures import Plan, first_block

LABEL_WIDTH, VALUE_WIDTH, RATIO_WIDTH = 42, 18, 8


def scaled(value: float, units: Sequence[str], base: float) -> str:
    """`value` in the largest unit it reaches, with three significant digits."""
    power = 0
    while power + 1 < len(units) and value >= base:
        value, power = value / base, power + 1
    text = f"{value:.0f}" if power == 0 else f"{value:.{max(0, 3 - len(str(int(value))))}f}"
    return f"{text} {units[power]}".strip()


def show_count(value: int) -> str:
    return f"{value:,}" if value < 10_000_000 else scaled(value, ("", "K", "M", "B", "T"), 1000)


def show_parameters(value: int) -> str:
    return scaled(value, ("", "K", "M", "B", "T"), 1000)


def show_flops(value: int) -> str:
    return scaled(value, ("FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs", "EFLOPs", "ZFLOPs"), 1000)


def show_bytes(value: int) -> str:
    return scaled(value, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: where the value stands in a plan, and how it is shown. A heading has no path."""

    label: str
    path: tuple[str | int, ...] = ()
    show: Callable[[Any], str] = show_count

    def value(self, plan: Plan) -> Any:
        value: Any = plan
        for key in self.path:
            if isinstance(value, dict):
                value = value.get(str(key))
            elif value is not None:
                value = value[int(key)]
        return value


def _rows(plans: Sequence[Plan]) -> Iterator[Row]:
    yield Row("Layout")
    yield Row("  ranks", ("layout", "world_size"))
    yield Row("  expert-parallel ranks", ("layout", "ep_size"))
    yield Row("  ZeRO stage", ("layout", "zero_stage"))
    yield Row("  precision", ("layout", "precision"), str)
    yield Row("  rows per rank and micro-batch", ("layout", "rows_per_micro_batch"))
    yield Row("  micro-batches per step", ("layout", "micro_batches_per_step"))
    yield Row("  tokens per step, all ranks", ("layout", "tokens_per_step"))
    yield Row("Run")
    yield Row("  steps", ("run", "steps"))
    yield Row("    of them warm-up of the depth capacity", ("run", "warmup_steps"))
    yield Row("  tokens", ("run", "tokens"))
    yield Row("  training FLOPs", ("run", "training_flops"), show_flops)
    yield Row("Parameters")
    yield Row("  total", ("parameters", "total"), show_parameters)
    yield from _named("    ", ("parameters", "by_group"), plans, show_parameters)
    yield Row("  active per token", ("parameters", "active_per_token"), show_parameters)
    yield from _named("    ", ("parameters", "active_by_group"), plans, show_parameters)
    for routed, name in ((False, "plain"), (True, "routed")):
        if any(first_block(plan, routed) for plan in plans):
            yield from _block_rows(name)
    yield Row("All blocks, per rank and micro-batch")
    yield from _routing_rows(("routing",))
    yield Row("FLOPs")
    yield Row("  forward, per token", ("flops", "forward_per_token"), show_flops)
    yield Row("  training, per token", ("flops", "training_per_token"), show_flops)
    yield Row("  training, per step on all ranks", ("flops", "training_per_step"), show_flops)
    yield Row("  recomputed, per step on all ranks", ("flops", "recompute_per_step"), show_flops)
    yield Row("  training, per rank and micro-batch, by part")
    yield from _named("    ", ("flops", "training_per_micro_batch_by_part"), plans, show_flops)
    yield Row("All-to-all, per rank")
    yield Row("  largest", ("communication", "largest_all_to_all_bytes"), show_bytes)
    yield Row("  number per step", ("communication", "all_to_alls_per_step"))
    yield Row("  sent per step", ("communication", "bytes_per_rank_and_step"), show_bytes)
    yield Row("  of which leaves the rank", ("communication", "bytes_leaving_per_rank_and_step"), show_bytes)
    yield Row("Memory per rank")
    for name in ("parameters", "gradients", "optimizer"):
        yield Row(f"  {name}", ("memory", name), show_bytes)
    yield Row("  communication buffers (at most)", ("memory", "buffers"), show_bytes)
    yield Row("  activations (estimate)", ("memory", "activations"), show_bytes)
    yield Row("    with activation checkpointing", ("memory", "activations_with_checkpointing"), show_bytes)
    yield Row("    without", ("memory", "activations_without_checkpointing"), show_bytes)
    yield Row("  logits and loss (estimate)", ("memory", "logits"), show_bytes)
    yield Row("  peak (estimate)", ("memory", "total"), show_bytes)
    for stage in range(4):
        yield Row(f"    if ZeRO stage {stage}", ("memory", "total_by_zero_stage", stage), show_bytes)
    yield Row("Sampling, per sequence")
    yield Row("  key/value cache", ("sampling", "cache_bytes"), show_bytes)
    yield Row("  saved by depth routing", ("sampling", "cache_bytes_saved"), show_bytes)


def _block_rows(name: str) -> Iterator[Row]:
    yield Row(f"Each {name} block, per rank and micro-batch")
    yield Row("  blocks", (name, "layers"), str)
    yield Row("  tokens kept per sequence", (name, "kept_per_sequence"))
    yield Row("  capacity of an expert", (name, "expert_capacity"))
    yield from _routing_rows((name,))
    yield Row("  assignments per expert and step", (name, "assignments_per_expert_and_step"))
    yield Row("  parameters", (name, "parameters"), show_parameters)
    yield Row("  active per token", (name, "active_parameters"), show_parameters)
    yield Row("  forward", (name, "forward_flops"), show_flops)
    yield Row("  training", (name, "training_flops"), show_flops)


def _routing_rows(path: tuple[str, ...]) -> Iterator[Row]:
    yield Row("  tokens kept", (*path, "kept"))
    yield Row("  tokens skipped", (*path, "skipped"))
    yield Row("  assignments processed", (*path, "processed"))
    yield Row("  assignments no-op", (*path, "no_op"))
    yield Row("  assignments dropped", (*path, "dropped"))


def _named(indent: str, path: tuple[str, ...], plans: Sequence[Plan], show: Callable[[Any], str]) -> Iterator[Row]:
    """A row for every name that any plan has at `path`, in the order of first appearance."""
    found = [Row("", path).value(plan) for plan in plans]
    for name in dict.fromkeys(name for names in found for name in names):
        yield Row(indent + name.replace("_", " "), (*path, name), show)


def render(plans: Sequence[Plan]) -> str:
    """The table for one plan, or for two with the ratio of the first to the second."""
    lines = []
    for plan in plans:
        lines += textwrap.wrap(f"{plan['file']}: {plan['description']}", width=110, subsequent_indent="    ")
    shown = [{**plan, "plain": _kind(plan, False), "routed": _kind(plan, True)} for plan in plans]
    names = [Path(plan["file"]).stem for plan in plans]
    if len(set(names)) < len(names):
        names = [plan["file"] for plan in plans]
    width = max(VALUE_WIDTH, *(len(name) + 2 for name in names))
    header = "".join(name.rjust(width) for name in names) + ("ratio".rjust(RATIO_WIDTH) if len(plans) == 2 else "")
    lines += ["", (" " * LABEL_WIDTH + header).rstrip()]
    for row in _rows(plans):
        if not row.path:
            lines += [row.label] if row.label.startswith(" ") else ["", row.label]
            continue
        values = [row.value(plan) for plan in shown]
        cells = "".join(("-" if value is None else row.show(value)).rjust(width) for value in values)
        lines.append(row.label.ljust(LABEL_WIDTH) + cells + _ratio(values))
    warnings = [f"warning: {plan['file']}: {warning}" for plan in plans for warning in plan["warnings"]]
    return "\n".join([*lines, *([""] if warnings else []), *warnings]) + "\n"


def _kind(plan: Plan, routed: bool) -> Plan | None:
    block = first_block(plan, routed)
    if block is None:
        return None
    layers = [str(block["layer"]) for block in plan["blocks"] if block["routed"] is routed]
    listed = layers if len(layers) <= 4 else [*layers[:2], "..", layers[-1]]
    return {**block, "layers": " ".join(listed)}


def _ratio(values: Sequence[Any]) -> str:
    """The first value over the second, where that means something."""
    if len(values) != 2 or not all(isinstance(value, int) for value in values) or not values[1]:
        return ""
    return f"{values[0] / values[1]:.3f}".rjust(RATIO_WIDTH)
