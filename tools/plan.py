"""What a configuration will cost, before anyone books a machine.

    python tools/plan.py ds_configs/mode.json --compare ds_configs/moe.json
    python tools/plan.py ds_configs/scale/mode_7b.json --world_size 64 --memory_gb 80

Prints capacities, routed tokens, parameters, FLOPs, bytes sent and memory per rank, all expected from the
configuration by `mode.accounting`; with --compare side by side with another file. It builds no model and
imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mode import accounting
from mode.config import ModeConfig
from mode.config_file import EngineConfig, RunConfig, load_run_config
from mode.section import ConfigError

Plan = dict[str, Any]

FEW_ASSIGNMENTS = 8  # per expert and optimizer step: below it an expert's gradient is mostly noise
WEAK_BALANCE = 1.0  # a balance loss below this weight does not hold the no-op share near its target
LABEL_WIDTH, VALUE_WIDTH, RATIO_WIDTH = 42, 18, 8


# ---------------------------------------------------------------------------------------------------
# The figures, as plain JSON values with exact integers


def make_plan(file: str, run: RunConfig, world_size: int, memory_gb: float | None) -> Plan:
    config = run.mode
    rows, micro_batches = run.engine.batch_layout(world_size)
    counts = accounting.expected_counts(config, rows)
    blocks = [_block(run, layer, counts[layer], world_size * micro_batches) for layer in range(len(counts))]
    tokens_per_step = rows * config.model.sequence_length * micro_batches * world_size
    flops = _flops(config, counts, micro_batches * world_size)
    plan: Plan = {
        "file": file,
        "description": config.description,
        "layout": {
            "world_size": world_size,
            "ep_size": config.experts.ep_size if config.experts is not None else 1,
            "zero_stage": run.engine.zero_stage,
            "precision": run.engine.precision,
            "sequence_length": config.model.sequence_length,
            "rows_per_micro_batch": rows,
            "micro_batches_per_step": micro_batches,
            "tokens_per_step": tokens_per_step,
        },
        "run": _run_length(run, world_size, tokens_per_step, flops["training_per_step"]),
        "blocks": blocks,
        "routing": {name: sum(block[name] for block in blocks) for name in _COUNTED},
        "parameters": _parameters(config, counts),
        "flops": flops,
        "communication": _communication(config, blocks, micro_batches),
        "memory": _memory(run, world_size, rows),
        "sampling": _sampling(run),
    }
    plan["warnings"] = list(_warnings(plan, run, memory_gb))
    return plan


_COUNTED = ("kept", "skipped", "assignments", "processed", "no_op", "dropped")


def _block(run: RunConfig, layer: int, counts: accounting.BlockCounts, batches_per_step: int) -> Plan:
    config, experts = run.mode, run.mode.experts
    flops = accounting.block_flops(config, layer, counts)
    capacity = None
    if experts is not None and experts.capacity_factor is not None:
        capacity = accounting.expert_capacity(
            experts.capacity_factor, experts.top_k, counts.tokens, experts.no_op_fraction, experts.num_experts
        )
    sent = accounting.all_to_all_bytes(config, counts, accounting.ELEMENT_SIZE[run.engine.precision])
    return {
        "layer": layer,
        "routed": config.is_routed(layer),
        "kept_per_sequence": counts.slots,
        "expert_capacity": capacity,
        **{name: getattr(counts, name) for name in _COUNTED},
        "assignments_per_expert_and_step": (
            None if experts is None else counts.processed * batches_per_step // experts.num_experts
        ),
        "parameters": sum(accounting.block_parameters(config, layer).values()),
        "active_parameters": round(sum(accounting.active_block_parameters(config, layer, counts).values())),
        "forward_flops": flops.forward,
        "training_flops": flops.training,
        "all_to_all_bytes": sent,
        "all_to_all_bytes_leaving": accounting.leaving_bytes(sent, experts.ep_size) if experts is not None else 0,
    }


def _parameters(config: ModeConfig, counts: Sequence[accounting.BlockCounts]) -> Plan:
    active = accounting.active_parameters(config, counts)
    return {
        "total": accounting.num_parameters(config),
        "active_per_token": round(sum(active.values())),
        "by_group": accounting.model_parameters(config),
        "active_by_group": {group: round(parameters) for group, parameters in active.items()},
    }


def _flops(config: ModeConfig, counts: Sequence[accounting.BlockCounts], batches_per_step: int) -> Plan:
    flops = accounting.model_flops(config, counts)
    recompute = accounting.recompute_flops(config, counts)
    parts = accounting.model_flops_by_part(config, counts)
    return {
        "forward_per_token": round(accounting.per_token(flops.forward, counts)),
        "training_per_token": round(accounting.per_token(flops.training, counts)),
        "forward_per_micro_batch": flops.forward,
        "backward_per_micro_batch": flops.backward,
        "recompute_per_micro_batch": recompute,
        "training_per_step": flops.training * batches_per_step,
        "recompute_per_step": recompute * batches_per_step,
        "training_per_micro_batch_by_part": {part: part_flops.training for part, part_flops in parts.items()},
    }


def _communication(config: ModeConfig, blocks: Sequence[Plan], micro_batches: int) -> Plan:
    per_block = accounting.all_to_alls_per_block(config)
    times = per_block * micro_batches
    return {
        "all_to_alls_per_step": times * len(blocks),
        "largest_all_to_all_bytes": max(block["all_to_all_bytes"] for block in blocks) if per_block else 0,
        "bytes_per_rank_and_step": times * sum(block["all_to_all_bytes"] for block in blocks),
        "bytes_leaving_per_rank_and_step": times * sum(block["all_to_all_bytes_leaving"] for block in blocks),
    }


def _memory(run: RunConfig, world_size: int, rows: int) -> Plan:
    memory = accounting.memory_per_rank(run, world_size)
    counts = accounting.expected_counts(run.mode, rows)
    size = accounting.ELEMENT_SIZE[run.engine.precision]

    def activations(checkpointing: bool) -> int:
        model = dataclasses.replace(run.mode.model, activation_checkpointing=checkpointing)
        return accounting.activation_bytes(dataclasses.replace(run.mode, model=model), counts, size)

    return {
        **dataclasses.asdict(memory),
        "total": memory.total,
        "activations_with_checkpointing": activations(True),
        "activations_without_checkpointing": activations(False),
        "total_by_zero_stage": [accounting.memory_per_rank(run, world_size, stage).total for stage in range(4)],
    }


def _sampling(run: RunConfig) -> Plan:
    """The key/value cache of one row of the full sequence length, if causal routing keeps what training keeps."""
    counts = accounting.expected_counts(run.mode, rows=1, training=False)
    size = accounting.ELEMENT_SIZE[run.engine.precision]
    return {
        "cache_bytes": accounting.cache_bytes(run.mode, counts, size),
        "cache_bytes_saved": accounting.cache_bytes_saved(run.mode, counts, size),
    }


def _run_length(run: RunConfig, world_size: int, tokens_per_step: int, flops_per_step: int) -> Plan:
    steps = accounting.num_steps(run, world_size)
    return {"steps": steps, "tokens": steps * tokens_per_step, "training_flops": steps * flops_per_step}


def _warnings(plan: Plan, run: RunConfig, memory_gb: float | None) -> Iterator[str]:
    for routed in (False, True):
        block = _first(plan, routed)
        if block is None:
            continue
        name = "routed" if routed else "plain"
        if routed and block["kept_per_sequence"] == 1:
            yield "a routed block keeps one token per sequence: its attention has nothing to attend to"
        share = block["assignments_per_expert_and_step"]
        if share is not None and share < FEW_ASSIGNMENTS:
            yield (
                f"an expert of a {name} block will see about {share} assignments per step; below {FEW_ASSIGNMENTS} "
                "its gradient is mostly noise: use fewer experts or a larger batch"
            )
    experts, depth = run.mode.experts, run.mode.depth
    if experts is not None and experts.num_no_ops and experts.balance_bias is None:
        weight = experts.balance_loss.weight if experts.balance_loss is not None else 0.0
        if weight < WEAK_BALANCE:
            yield (
                f"the no-op share of {experts.no_op_fraction:g} is held by a balance loss of weight {weight:g} alone; "
                f"below {WEAK_BALANCE:g} the share drifts, and the work with it: set mode.experts.balance_bias"
            )
    if depth is not None and depth.selection == "learned" and depth.predictor is None and depth.aux_loss is None:
        yield "neither depth.predictor nor depth.aux_loss is set: nothing trains the decisions that sampling will need"
    total = plan["memory"]["total"]
    if memory_gb is not None and total > memory_gb * 1e9:
        yield f"about {total / 1e9:.1f} GB per rank, beyond the {memory_gb:g} GB of --memory_gb"
    zero = run.deepspeed.get("zero_optimization", {})
    for offload in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(offload), dict) and zero[offload].get("device") != "none":
            yield f"zero_optimization.{offload} is set; memory is counted as if nothing were offloaded"
    optimizer = run.deepspeed.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    if isinstance(kind, str) and kind.lower() not in ("adam", "adamw"):
        yield f'optimizer.type is "{kind}"; memory is counted as for Adam'


def _first(plan: Plan, routed: bool) -> Plan | None:
    """One block of a kind; by expectation all blocks of a kind are alike."""
    return next((block for block in plan["blocks"] if block["routed"] is routed), None)


# ---------------------------------------------------------------------------------------------------
# The table


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
    yield Row("  tokens", ("run", "tokens"))
    yield Row("  training FLOPs", ("run", "training_flops"), show_flops)
    yield Row("Parameters")
    yield Row("  total", ("parameters", "total"), show_parameters)
    yield from _named("    ", ("parameters", "by_group"), plans, show_parameters)
    yield Row("  active per token", ("parameters", "active_per_token"), show_parameters)
    yield from _named("    ", ("parameters", "active_by_group"), plans, show_parameters)
    for routed, name in ((False, "plain"), (True, "routed")):
        if any(_first(plan, routed) for plan in plans):
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
    block = _first(plan, routed)
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


# ---------------------------------------------------------------------------------------------------
# The command line


def complain(message: str) -> None:
    """One line on stderr, whatever line breaks a file name or a JSON key brings along."""
    print("plan.py: error: " + " ".join(message.splitlines()), file=sys.stderr)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        complain(message)
        self.exit(2)


def _positive_integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a whole number of at least 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a number above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="plan.py",
        description="Capacities, parameters, FLOPs, bytes sent and memory per rank that a configuration will need.",
    )
    parser.add_argument("config", help="a DeepSpeed JSON file with a mode section, such as ds_configs/mode.json")
    parser.add_argument(
        "--compare", metavar="FILE", help="a second file to show side by side, with ratios first/second"
    )
    parser.add_argument(
        "--world_size",
        type=_positive_integer,
        help="number of ranks (default: what the batch sizes imply, else the ep_size of the file)",
    )
    parser.add_argument("--ep_size", type=_positive_integer, help="overrides mode.experts.ep_size")
    parser.add_argument("--memory_gb", type=_positive_number, help="warn when a rank needs more (GB of 10^9 bytes)")
    parser.add_argument("--json", action="store_true", help="print exact figures as JSON")
    return parser


def load(file: str, arguments: argparse.Namespace) -> Plan:
    run = load_run_config(file)
    try:
        run = _with_ep_size(run, arguments.ep_size)
        ep_size = run.mode.experts.ep_size if run.mode.experts is not None else 1
        world_size = arguments.world_size or _implied_world_size(run.engine) or ep_size
        if world_size % ep_size:
            raise ConfigError(
                "mode.experts.ep_size",
                f"is {ep_size}, which does not divide the {world_size} ranks; "
                "use a --world_size that is a multiple of it, or another --ep_size",
            )
        plan = make_plan(file, run, world_size, arguments.memory_gb)
    except ConfigError as error:
        raise error.in_file(file) from None
    if arguments.ep_size is not None and run.mode.experts is None:
        plan["warnings"].append("--ep_size has no effect: there are no experts")
    return plan


def _with_ep_size(run: RunConfig, ep_size: int | None) -> RunConfig:
    experts = run.mode.experts
    if ep_size is None or experts is None:
        return run
    try:
        experts = dataclasses.replace(experts, ep_size=ep_size)
    except ConfigError as error:
        raise error.under("mode.experts") from None
    return dataclasses.replace(run, mode=dataclasses.replace(run.mode, experts=experts))


def _implied_world_size(engine: EngineConfig) -> int:
    """The number of ranks at which the three batch settings agree; 0 if they do not say."""
    micro, steps, batch = engine.micro_batch_size, engine.accumulation_steps, engine.train_batch_size
    return batch // (micro * steps) if micro and steps and batch else 0


def main() -> int:
    arguments = build_parser().parse_args()
    try:
        plans = [load(file, arguments) for file in (arguments.config, arguments.compare) if file is not None]
    except ConfigError as error:
        complain(str(error))
        return 2
    if arguments.json:
        text = json.dumps({"plan": plans[0], "compare": plans[1] if len(plans) == 2 else None}, indent=2) + "\n"
    else:
        text = render(plans)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a description may use letters the terminal lacks
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Nobody is left to read, or the disk is full. Python would flush once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            complain(f"cannot write: {error.strerror}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
