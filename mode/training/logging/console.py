"""What the user sees: a bar and validation lines on a terminal, a line per logged step elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from mode import accounting
from mode.config.file import RunConfig


class Console:
    """Progress of a run of `total` steps that continues from `start`."""

    def __init__(self, start: int, total: int, active: bool) -> None:
        self.active, self.start, self.total = active, start, total
        self.first_step_ended: float | None = None
        on_terminal = active and sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True) if on_terminal else None

    def advance(self) -> None:
        if self.first_step_ended is None:
            self.first_step_ended = time.perf_counter()
        if self.bar is not None:
            self.bar.update()

    def report(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of a logged step: a line; on a terminal on the bar, and the losses of an evaluation above it."""
        if not self.active:
            return
        shown = [(name, values[tag], form) for tag, name, form in REPORTED if tag in values]
        if self.bar is not None:
            self.bar.set_postfix({name: form.format(value) for name, value, form in shown if name in ON_THE_BAR})
            if "loss/val" not in values:
                return
            shown = [figure for figure in shown if figure[0] in ABOVE_THE_BAR]
        figures = [f"{name} {form.format(value)}" for name, value, form in shown]
        self.note("  ".join([f"step {step:>6}/{self.total}", *self._time_left(step), *figures]))

    def _time_left(self, step: int) -> list[str]:
        """By the mean of the steps since the first, which may have compiled, with their evaluations and saves.

        The bar has its own.
        """
        done = step - self.start - 1
        if self.bar is not None or self.first_step_ended is None or done < 1:
            return []
        seconds = (time.perf_counter() - self.first_step_ended) / done * (self.total - step)
        return [f"ETA {tqdm.format_interval(seconds)}"]

    def note(self, text: str) -> None:
        if self.active:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


# (tag, name, format), in the order of a line
REPORTED = (
    ("loss/train", "loss", "{:.4f}"),
    ("loss/val", "val", "{:.4f}"),
    ("loss/val_causal", "causal", "{:.4f}"),
    ("optim/lr", "lr", "{:.2e}"),
    ("optim/grad_norm", "grad", "{:.3f}"),
    ("perf/tokens_per_second", "tok/s", "{:.0f}"),
    ("perf/flops_per_second", "FLOP/s", "{:.2e}"),
    ("perf/mfu", "MFU", "{:.1%}"),
    ("experts/no_op_share", "no-op", "{:.3f}"),
    ("depth/kept_fraction", "kept", "{:.3f}"),
)
ON_THE_BAR, ABOVE_THE_BAR = ("loss", "tok/s"), ("loss", "val", "causal")


def table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def plan_table(run: RunConfig, world_size: int) -> str:
    """The run in numbers, before it starts."""
    micro, accumulation = run.engine.batch_layout(world_size)
    rows = micro * accumulation * world_size
    config, steps = run.mode, accounting.num_steps(run, world_size)
    flops = accounting.step_flops(run, world_size)
    warmed_up = " after the warm-up" if config.depth is not None and config.depth.warmup_fraction else ""
    active = sum(accounting.active_parameters(config, accounting.expected_counts(config, micro)).values())
    memory = accounting.memory_per_rank(run, world_size)
    return table(
        [
            ("parameters", f"{accounting.num_parameters(config):,} ({float(active):,.0f} active per token)"),
            ("batch", f"{rows} sequences = {micro} rows x {accumulation} micro-batches x {world_size} ranks"),
            ("steps", f"{steps:,} of {rows * config.model.sequence_length:,} tokens"),
            (
                "training FLOPs",
                f"{flops:.3e} per step{warmed_up}, {accounting.run_flops(run, world_size, steps):.3e} in all",
            ),
            ("layout", f"ZeRO stage {run.engine.zero_stage}, {run.engine.precision}, {world_size} ranks"),
            ("memory per rank", f"about {memory.total / 2**20:,.0f} MiB"),
        ]
    )
