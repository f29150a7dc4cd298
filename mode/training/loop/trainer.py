"""The training loop: one function per thing that happens in a step.

Nothing is remembered between steps but parameters, optimizer, scheduler and the position (step, tokens,
FLOPs); those are what a checkpoint holds, so a resumed run repeats the uninterrupted one to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from mode import accounting
from mode.config.file import RunConfig
from mode.data import Batch, PackedData, TrainLoader
from mode.ops.library import kernels_unavailable
from mode.records import BlockRouting
from mode.runs import describe_extension
from mode.training.checkpoints import checkpoint as checkpoints
from mode.training.checkpoints.elastic import for_any_layout, layout_of, load_universal
from mode.training.checkpoints.same_run import (
    check_plan,
    check_same_run,
    extensions_of,
    flat,
    identity,
    plan,
    replanned,
)
from mode.training.logging.clock import Clock
from mode.training.logging.console import Console
from mode.training.logging.metrics import counted_flops, decision_image, routing_figures, routing_histograms
from mode.training.logging.opening import (
    check_own_directory,
    description,
    lock_directory,
    start_from,
    write_settings,
)
from mode.training.logging.recorder import Recorder, check_monitors
from mode.training.logging.summary import closing_table, commands, sample
from mode.training.loop.compiling import compile_dense_parts
from mode.training.loop.engine import agreed_backend, build_engine, build_model, device
from mode.training.loop.evaluate import Evaluation, evaluate
from mode.training.loop.inputs import Inputs
from mode.training.loop.step import optimizer_step
from mode.training.safety.shared_directory import check_same_corpus, check_shared
from mode.training.safety.stop_signal import StopSignal
from mode.training.safety.stops import NotFinite, StepGuard, Verdict, describe_not_finite
from mode.training.safety.watchdog import Watchdog
from mode.transformer.model import ModeTransformer

START_PATIENCE = 60.0  # seconds: building an engine may compile, and reading a checkpoint takes its time


class Trainer:
    """Everything of one run on this rank."""

    def __init__(
        self,
        run: RunConfig,
        data: PackedData,
        run_dir: Path,
        resume: str,
        watchdog: Watchdog,
        stop_signal: StopSignal,
        extend: bool = False,
    ) -> None:
        """`extend` lets a run that exists go on by another plan: length, optimizer settings, schedule."""
        self.run, self.data, self.run_dir, self.watchdog = run, data, run_dir, watchdog
        self.stop_signal, self.interrupted = stop_signal, False  # of this rank; whether any rank was asked to stop
        self.config = run.mode
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.micro_rows, self.num_micros = run.engine.batch_layout(self.world_size)
        self.global_rows = self.micro_rows * self.num_micros * self.world_size
        self.num_steps = accounting.num_steps(run, self.world_size)
        self.device = device()
        self.end_of_text = data.tokenizer.end_of_text if self.config.data.document_masking else None
        self.loader = TrainLoader(
            data.train.rows, global_batch_size=self.global_rows, seed=self.config.seed, end_of_text=self.end_of_text
        )
        self.identity, self.plan = identity(run, data, self.global_rows), plan(run, self.num_steps)
        check_monitors(run.deepspeed)
        self.watchdog.progress("the start, looking for a checkpoint", START_PATIENCE)
        self.lock = lock_directory(run_dir)
        check_shared(run_dir)
        check_same_corpus(data.digest, data.folder)
        looking = partial(self.watchdog.progress, "the start, looking for a checkpoint", START_PATIENCE)
        found = checkpoints.find_checkpoint(resume, run_dir / "checkpoints", looking)
        self.extensions: list[dict[str, Any]] = []
        changes: dict[str, Any] = {}
        if found is not None:
            check_same_run(found, self.identity)
            changes = check_plan(found, self.plan, extend)
            self.extensions = extensions_of(found, changes)
            check_own_directory(found, run_dir)
        checkpoints.discard_leftovers(run_dir / "checkpoints")
        self.watchdog.progress("the start, building the engine", START_PATIENCE)
        self.backend = agreed_backend(run)
        if device().type == "cpu":
            kernels_unavailable()  # compiles the kernels now, if need be, and not within the first step
        model = build_model(self.config if self.backend is None else self.config.with_backend(self.backend[0]))
        if found is None and self.config.train.init_from is not None:
            start_from(model, self.config.train.init_from, data.tokenizer)
        if self.config.train.compile:
            compile_dense_parts(model, run, self.device)
        self.layout = layout_of(run, self.world_size)
        saved_layout = self.layout if found is None else checkpoints.run_of(found).get("layout", {})
        self.engine = build_engine(run, model, self.world_size, universal=saved_layout != self.layout)
        self.position = {"step": 0, "tokens": 0, "flops": 0}
        self.val_losses: dict[str, float] | None = None  # the last ones evaluated
        self.unlogged: dict[str, float] | None = None  # of the step resumed from, if its evaluation is still to come
        if found is not None:
            with replanned(self.engine, found, changes):
                self._restore(found, saved_layout)
        checkpoints.clear_after(run_dir / "checkpoints", self.position["step"], set_aside=resume == "auto")
        self.guard = StepGuard(self.model, self.device, watch_gradients=run.engine.precision != "fp16")
        self.recorder = Recorder(run_dir, run.deepspeed, self.rank, self.position["step"])
        self.console = Console(self.position["step"], self.num_steps, active=self.rank == 0)
        self._describe(found)
        if changes:
            self.console.note(f"  {describe_extension(self.extensions[-1])}\n")
        distributed.barrier()  # the first step has a shorter limit than the start of the slowest rank

    @property
    def model(self) -> ModeTransformer:
        return self.engine.module

    # ---- the loop ----

    def train(self) -> bool:
        """Trains to the end, or until a rank is asked to stop: then returns True, and the run can be resumed."""
        train = self.config.train
        last = min(self.num_steps, train.stop_after or self.num_steps)
        self.clock = Clock(self.position, self.run.engine.precision, self.device)
        if self.position["step"] >= self.num_steps:
            self.console.note("this run is complete; --resume never would start it afresh")
        self.interrupted = self.guard.verdict(self.stop_signal.received).stop
        if self.interrupted:
            self.console.note("stopped before the first step; start the same command again")
            self.recorder.close()
            return True
        if self.unlogged is not None:
            self._log(self.unlogged, evaluates=True)
        while self.position["step"] < last and not self.interrupted:
            values = self._step()
            step = self.position["step"]
            self.console.advance()
            evaluates = step % train.eval_every == 0 or step == self.num_steps
            if self.interrupted and evaluates:  # a launcher may kill it within seconds: resuming evaluates
                self._save(unlogged=values or {})
                break
            self._log(values, evaluates)
            if step % train.save_every == 0 or step >= last or self.interrupted:
                self._save()
        self._finish()
        return self.interrupted

    def _log(self, values: dict[str, float] | None, evaluates: bool) -> None:
        if evaluates:
            values = {**(values or {}), **self._evaluate()}
        if values:
            self.recorder.write(self.position, values)
            self.console.report(self.position["step"], values)
            self._refuse_bad_validation(values)

    def _step(self) -> dict[str, float] | None:
        """Takes one optimizer step and returns what to log, if this step is logged; notices a request to stop."""
        position = self.position["step"]

        def approve(losses: list[Tensor], inputs: Inputs) -> None:
            for loss in losses:
                self.guard.see_loss(loss)
            verdict = self.guard.verdict(self.stop_signal.received)
            self._refuse_what_is_not_finite(verdict, inputs)
            self.interrupted = verdict.stop

        share = None
        if self.config.depth is not None:  # evaluated is the model as it will be used, trained the share of this step
            share = accounting.capacity_fraction_at(self.config.depth, position, self.num_steps)
        step = optimizer_step(self.engine, self.run, self._batches(position), self.device, approve, share)
        listed = step.sums.tolist()
        self.position = {
            "step": position + 1,
            "tokens": self.position["tokens"] + self.global_rows * self.config.model.sequence_length,
            "flops": self.position["flops"] + counted_flops(self.config, self.global_rows, listed, share),
        }
        if (position + 1) % self.config.train.log_every and position + 1 != self.num_steps:
            return None
        terms = torch.stack(list(step.losses.values()))
        distributed.all_reduce(terms)
        losses = dict(zip(step.losses, (terms / (self.num_micros * self.world_size)).tolist(), strict=True))
        values = {"loss/train": losses.pop("cross_entropy"), **{f"loss/{name}": v for name, v in losses.items()}}
        values |= {"optim/lr": step.lr, "optim/grad_norm": step.grad_norm}
        values |= self.clock.figures(self.position)
        detailed = self.config.train.monitor == "detailed"
        values |= routing_figures(self.config, listed, detailed)
        if detailed:
            for tag, seen in routing_histograms(step.routing, listed):
                self.recorder.write_histogram(tag, seen, self.position["step"])
        return values

    def _batches(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches of a step."""
        for micro in range(self.num_micros):
            self.watchdog.progress(f"step {step + 1}")
            yield self.loader.batch(
                step, rank=self.rank, world_size=self.world_size, micro=micro, num_micros=self.num_micros
            )

    def _refuse_what_is_not_finite(self, verdict: Verdict, inputs: Inputs) -> None:
        if not verdict.bad_loss_ranks and not verdict.bad_groups:
            return
        what = describe_not_finite(verdict, self.model, inputs)
        raise NotFinite(
            f"step {self.position['step'] + 1}: {what}. No weight was changed by this step; {self._what_may_help()}"
        )

    def _refuse_bad_validation(self, values: dict[str, float]) -> None:
        """A model whose validation loss is not finite is not saved: its run could not go on from there."""
        bad = [f"{tag} is {values[tag]}" for tag in ("loss/val", "loss/val_causal") if not isfinite(values.get(tag, 0))]
        if bad:
            raise NotFinite(f"step {self.position['step']}: {' and '.join(bad)}; {self._what_may_help()}")

    def _what_may_help(self) -> str:
        kept = checkpoints.complete_checkpoints(self.run_dir / "checkpoints")
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        return (
            f"{good}. A lower learning rate, a longer warm-up or a smaller gradient_clipping may help: a run that has "
            "checkpoints takes them with --extend"
        )

    # ---- evaluation, saving, logging ----

    def _evaluate(self) -> dict[str, float]:
        with self.clock.paused():
            self.val_losses, routing = self._validate()
            if self.rank == 0:
                self.recorder.write_decisions(decision_image(routing, row=0), self.position["step"])
        return self.val_losses

    def _validate(self) -> tuple[dict[str, float], tuple[BlockRouting, ...]]:
        """Losses on the validation rows with top-k routing and, where that sees the future, as in sampling."""
        top_k = self._validation_loss()
        values = {"loss/val": top_k.loss}
        if self.config.depth is not None:
            causal = self._validation_loss(causal=True)
            kept = [shares.kept for shares in causal.depth.values()]
            values |= {"loss/val_causal": causal.loss, "depth/kept_fraction_causal": sum(kept) / len(kept)}
        values["loss/counted"] = values.get("loss/val_causal", top_k.loss)  # one tag by which all runs can be compared
        return values, top_k.routing

    def _validation_loss(self, causal: bool = False) -> Evaluation:
        return evaluate(
            self.engine,
            self.data.validation,
            num_rows=self.config.train.eval_sequences,
            batch_size=self.micro_rows,
            end_of_text=self.end_of_text,
            device=self.device,
            progress=partial(self.watchdog.progress, f"the evaluation after step {self.position['step']}"),
            causal=causal,
        )

    def _save(self, unlogged: dict[str, float] | None = None) -> None:
        folder, stage = self.run_dir / "checkpoints", f"the save of step {self.position['step']}"
        progress = partial(self.watchdog.progress, stage)
        progress()
        with self.clock.paused(), self.watchdog.following(stage, partial(checkpoints.num_bytes, folder)):
            buffers = dict(self.model.named_buffers())  # a universal checkpoint has none
            rng = torch.get_rng_state()
            state = {"position": self.position, "rng": rng, "buffers": buffers, "unlogged": unlogged}
            checkpoints.save_checkpoint(
                self.engine,
                folder,
                self.position["step"],
                state,
                self.config.train.keep_last,
                {
                    **self.identity,
                    "plan": self.plan,
                    "extensions": self.extensions,
                    "config": self.config.to_dict(),
                    "layout": self.layout,
                },
                progress,
            )

    def _restore(self, found: Path, saved_layout: dict[str, Any]) -> None:
        stage = f"the start, loading {found}"
        self.watchdog.progress(stage, START_PATIENCE)
        if saved_layout == self.layout:
            state = checkpoints.load_checkpoint(self.engine, found)
        else:
            copy = self.run_dir / "checkpoints" / f"{found.name}.universal"
            progress = partial(self.watchdog.progress, stage, START_PATIENCE)
            with for_any_layout(found, copy, saved_layout, self.layout, progress):
                state = load_universal(self.engine, copy)
        self.position = dict(state["position"])
        self.unlogged = state.get("unlogged")
        torch.set_rng_state(state["rng"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])

    # ---- the beginning and the end ----

    def _describe(self, found: Path | None) -> None:
        if self.rank == 0:
            write_settings(self.run, self.data, self.run_dir, self.extensions)
            if found is None:
                self.recorder.write_hparams(flat(self.config.to_dict()))
        step = self.position["step"]
        self.console.note(description(self.run, self.data, self.run_dir, self.backend, found, step))

    def _finish(self) -> None:
        """Samples and prints the closing table; the state of the run is saved already."""
        seconds = self.clock.seconds()
        self.console.close()
        if self.interrupted or self.position["step"] < self.num_steps:
            self.console.note(f"\nstopped at step {self.position['step']} of {self.num_steps}; the state is saved.")
            self.console.note(commands(self.run_dir, self.world_size))
            self.recorder.close()
            return
        losses = self.val_losses or self._validate()[0]
        self._refuse_bad_validation(losses)
        self.watchdog.progress("the closing sample")
        text = sample(self.model, self.run, self.data, self.device)
        self.watchdog.close()  # no collective follows, and the closing table may take its time
        self.recorder.write_text("sample", text, self.position["step"])
        self.recorder.close()
        if self.rank == 0:
            figures = closing_table(
                self.model, self.data, self.run_dir / "metrics.jsonl", self.position, losses, seconds
            )
            self.console.note(f"\n{figures}\n\nsample:\n{text}\n\n{commands(self.run_dir, self.world_size)}")
