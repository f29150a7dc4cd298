"""The training loop: one function per thing that happens in a step.

Nothing is remembered between steps but parameters, optimizer, scheduler and the position (step, tokens,
FLOPs); those are what a checkpoint holds, so a resumed run repeats the uninterrupted one to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, distributed

from mode import accounting
from mode.config_file import RunConfig
from mode.data import Batch, PackedData, Tokenizer, TrainLoader, bigram_loss, spread_rows
from mode.model.pretrained import check_same_model
from mode.model.transformer import ModeOutput, ModeTransformer
from mode.routing import BlockRouting
from mode.section import ConfigError, show
from mode.training import checkpoint as checkpoints
from mode.training.compiling import compile_dense_parts, uncompiled
from mode.training.console import Console, plan_table, table
from mode.training.elastic import for_any_layout, layout_of, load_universal
from mode.training.engine import agreed_backend, build_engine, build_model, device, peak_flops, peak_memory
from mode.training.evaluate import Evaluation, evaluate
from mode.training.inputs import Inputs
from mode.training.metrics import CHOICES, counted_flops, decision_image, routing_figures
from mode.training.recorder import Recorder
from mode.training.shared import check_shared
from mode.training.step import optimizer_step
from mode.training.stops import NotFinite, StepGuard, StopSignal, Verdict, first_bad_block
from mode.training.watchdog import Watchdog

START_PATIENCE = 60.0  # seconds: building an engine may compile, and reading a checkpoint takes its time
SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS = 24, 72


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    finished: bool  # False: stopped early, to be resumed
    step: int


class Trainer:
    """Everything of one run on this rank."""

    def __init__(self, run: RunConfig, data: PackedData, run_dir: Path, resume: str, watchdog: Watchdog) -> None:
        self.run, self.data, self.run_dir, self.watchdog = run, data, run_dir, watchdog
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
        self.watchdog.progress("the start, looking for a checkpoint", START_PATIENCE)
        self.lock = _lock(run_dir, self.rank)
        check_shared(run_dir)
        checkpoints.discard_leftovers(run_dir / "checkpoints")
        found = checkpoints.find_checkpoint(resume, run_dir / "checkpoints")
        if found is not None:
            _check_same_run(found, self.identity())
        self.watchdog.progress("the start, building the engine", START_PATIENCE)
        self.backend = agreed_backend(run)
        model = build_model(self.config if self.backend is None else self.config.with_backend(self.backend[0]))
        if found is None and self.config.train.init_from is not None:
            _start_from(model, self.config.train.init_from, data.tokenizer)
        if self.config.train.compile:
            compile_dense_parts(model, run, self.device)
        self.layout = layout_of(run, self.world_size)
        saved_layout = self.layout if found is None else checkpoints.run_of(found).get("layout", {})
        self.engine = build_engine(run, model, self.world_size, universal=saved_layout != self.layout)
        self.position = {"step": 0, "tokens": 0, "flops": 0}
        self.val_losses: dict[str, float] | None = None  # the last ones evaluated
        if found is not None:
            self._restore(found, saved_layout)
        checkpoints.discard_after(run_dir / "checkpoints", self.position["step"])
        self.guard = StepGuard(self.model, self.device, watch_gradients=run.engine.precision != "fp16")
        self.recorder = Recorder(run_dir, run.deepspeed, self.rank, self.position["step"])
        self.console = Console(self.position["step"], self.num_steps, active=self.rank == 0)
        self.peak_flops = peak_flops(run.engine.precision)
        self._describe(found)
        distributed.barrier()  # the first step has a shorter limit than the start of the slowest rank

    @property
    def model(self) -> ModeTransformer:
        return self.engine.module

    def identity(self) -> dict[str, Any]:
        """What must not change between the parts of one run, because it would be another run."""
        mode = self.config.to_dict()
        mode.pop("train")
        mode.pop("description")
        mode["model"].pop("activation_checkpointing")
        mode["data"].pop("cache_dir")
        if mode["depth"] is not None:
            mode["depth"].pop("causal")
        if mode["experts"] is not None:
            mode["experts"].pop("backend")
            mode["experts"].pop("ep_size")
        corpus = {"train": asdict(self.data.train.counts), "validation": asdict(self.data.validation.counts)}
        optimizer = self.run.deepspeed.get("optimizer", {}).get("type")
        return {"mode": mode, "train_batch_size": self.global_rows, "corpus": corpus, "optimizer.type": optimizer}

    # ---- the loop ----

    def train(self) -> Summary:
        stop_signal = StopSignal()
        train = self.config.train
        last = min(self.num_steps, train.stop_after or self.num_steps)
        self._start_clock()
        if self.position["step"] >= self.num_steps:
            self.console.note("this run is complete; --resume never would start it afresh")
        while self.position["step"] < last:
            values, interrupted = self._step(stop_signal)
            step = self.position["step"]
            self.console.advance()
            ends = interrupted or step >= last
            if step % train.eval_every == 0 or step == self.num_steps:
                values = {**(values or {}), **self._evaluate()}
            if values:
                self.recorder.write(self.position, values)
                self.console.report(step, values)
            if step % train.save_every == 0 or ends:
                self._save()
            if interrupted:
                break
        return self._finish()

    def _step(self, stop_signal: StopSignal) -> tuple[dict[str, float] | None, bool]:
        """One optimizer step: (what to log, if this step is logged; whether a rank was asked to stop)."""
        position = self.position["step"]
        stop = False

        def approve(losses: list[Tensor], inputs: Inputs) -> None:
            nonlocal stop
            for loss in losses:
                self.guard.see_loss(loss)
            verdict = self.guard.verdict(stop_signal.received)
            self._refuse_what_is_not_finite(verdict, inputs)
            stop = verdict.stop

        step = optimizer_step(self.engine, self.run, self._batches(position), self.device, approve)
        listed = step.sums.tolist()
        self.position = {
            "step": position + 1,
            "tokens": self.position["tokens"] + self.global_rows * self.config.model.sequence_length,
            "flops": self.position["flops"] + counted_flops(self.config, self.global_rows, listed),
        }
        if (position + 1) % self.config.train.log_every and position + 1 != self.num_steps:
            return None, stop
        terms = torch.stack(list(step.losses.values()))
        distributed.all_reduce(terms)
        losses = dict(zip(step.losses, (terms / (self.num_micros * self.world_size)).tolist(), strict=True))
        values = {"loss/train": losses.pop("cross_entropy"), **{f"loss/{name}": v for name, v in losses.items()}}
        values |= {"optim/lr": step.lr, "optim/grad_norm": step.grad_norm}
        values |= self._performance()
        detailed = self.config.train.monitor == "detailed"
        values |= routing_figures(self.config, listed, detailed)
        if detailed:
            self._write_histograms(step.last, listed)
        return values, stop

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
        step = self.position["step"] + 1
        if verdict.bad_loss_ranks:
            where = first_bad_block(self.model, inputs)  # every rank runs it: a forward pass can be a collective
            places: list[Any] = [None] * self.world_size
            distributed.all_gather_object(places, where)
            ranks = verdict.bad_loss_ranks
            what = "; ".join(f"the loss of rank {rank} is not finite, first seen in {places[rank]}" for rank in ranks)
        else:
            what = "; ".join(
                f"the gradient of rank {rank} is not finite in {', '.join(groups)}"
                for rank, groups in verdict.bad_groups.items()
            )
        kept = checkpoints.complete_checkpoints(self.run_dir / "checkpoints")
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise NotFinite(
            f"step {step}: {what}. No weight was changed by this step; {good}. "
            "A lower learning rate, a longer warm-up or a smaller gradient_clipping may help"
        )

    # ---- evaluation, saving, logging ----

    def _evaluate(self) -> dict[str, float]:
        started = time.perf_counter()
        self.val_losses, routing = self._validate()
        if self.rank == 0:
            self.recorder.write_decisions(decision_image(routing, row=0), self.position["step"])
        self.clock_start += time.perf_counter() - started
        return self.val_losses

    def _validate(self) -> tuple[dict[str, float], tuple[BlockRouting, ...]]:
        """Losses on the validation rows with top-k routing and, where that sees the future, as in sampling."""
        top_k = self._validation_loss()
        values = {"loss/val": top_k.loss}
        if self.config.depth is not None:
            causal = self._validation_loss(causal=True)
            kept = [shares.kept for shares in causal.depth.values()]
            values |= {"loss/val_causal": causal.loss, "depth/kept_fraction_causal": sum(kept) / len(kept)}
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

    def _save(self) -> None:
        started = time.perf_counter()
        self.watchdog.progress(f"the save of step {self.position['step']}")
        buffers = dict(self.model.named_buffers())  # a universal checkpoint has none
        state = {"position": self.position, "rng": torch.get_rng_state(), "buffers": buffers}
        checkpoints.save_checkpoint(
            self.engine,
            self.run_dir / "checkpoints",
            self.position["step"],
            state,
            self.config.train.keep_last,
            {**self.identity(), "config": self.config.to_dict(), "layout": self.layout},
        )
        self.clock_start += time.perf_counter() - started

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
        torch.set_rng_state(state["rng"])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])

    def _start_clock(self) -> None:
        self.started = self.clock_start = time.perf_counter()
        self.clock_position = self.position

    def _performance(self) -> dict[str, float]:
        """Since the last call; evaluation and saving are left out. The peak of memory is of the whole process."""
        now = time.perf_counter()
        seconds = now - self.clock_start
        done = {name: self.position[name] - self.clock_position[name] for name in self.position}
        self.clock_start, self.clock_position = now, self.position
        values = {
            "perf/tokens_per_second": done["tokens"] / seconds,
            "perf/flops_per_second": done["flops"] / seconds,
            "perf/step_seconds": seconds / done["step"],
            "perf/peak_memory_bytes": peak_memory(self.device),
        }
        if self.peak_flops is not None:
            values["perf/mfu"] = done["flops"] / seconds / (self.peak_flops * self.world_size)
        return values

    def _write_histograms(self, out: ModeOutput, sums: list[list[float]]) -> None:
        """Of all ranks: the router logits of the last micro-batch, the choices of the whole step."""
        for record in out.routing:
            if record.depth is not None:
                logits = record.depth.logits_BL.detach().contiguous()
                everyone = [torch.empty_like(logits) for _ in range(self.world_size)]
                distributed.all_gather(everyone, logits)
                tag = f"histogram/depth_logits/block_{record.layer}"
                self.recorder.write_histogram(tag, torch.cat(everyone), self.position["step"])
            if record.experts is not None:
                counts = torch.tensor(sums[record.layer][CHOICES : CHOICES + record.experts.num_experts])
                tag = f"histogram/tokens_per_expert/block_{record.layer}"
                self.recorder.write_histogram(tag, counts, self.position["step"])

    # ---- what the user reads ----

    def _describe(self, found: Path | None) -> None:
        if self.rank == 0:
            mode = self.config.to_dict()
            mode["train"]["stop_after"] = None  # the file is there to go on with
            settings = {**self.run.deepspeed, "mode": mode}
            (self.run_dir / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            self.data.tokenizer.save(self.run_dir / "tokenizer")
            if found is None:
                self.recorder.write_hparams(_flat(self.config.to_dict()))
        counts = self.data.train.counts
        self.console.note(f"{self.config.description}\n")
        self.console.note(plan_table(self.run, self.world_size))
        if self.backend is not None:
            self.console.note("  experts          {} ({})".format(*self.backend))
        self.console.note(
            f"  data             {self.data.source}: {counts.num_tokens:,} training tokens in "
            f"{counts.num_documents:,} documents\n  run directory    {self.run_dir}"
        )
        weights = self.config.train.init_from
        fresh = "starting at step 0" + (f" with the weights of {weights}" if weights is not None else "")
        start = fresh if found is None else f"resuming from {found} at step {self.position['step']}"
        self.console.note(f"  {start}\n")

    def _finish(self) -> Summary:
        """Samples and prints the closing table; the state of the run is saved already."""
        seconds = time.perf_counter() - self.started
        self.console.close()
        finished = self.position["step"] >= self.num_steps
        if not finished:
            self.console.note(f"\nstopped at step {self.position['step']} of {self.num_steps}; the state is saved.")
            self.console.note(self._commands())
            self.recorder.close()
            return Summary(False, self.position["step"])
        losses = self.val_losses or self._validate()[0]
        self.watchdog.progress("the closing sample")
        sample = self._sample()
        self.watchdog.close()  # no collective follows, and the closing table may take its time
        self.recorder.write_text("sample", sample, self.position["step"])
        self.recorder.close()
        if self.rank == 0:
            self.console.note(f"\n{self._closing_table(losses, seconds)}\n\nsample:\n{sample}\n\n{self._commands()}")
        return Summary(True, self.position["step"])

    def _closing_table(self, losses: dict[str, float], seconds: float) -> str:
        validation, loss = self.data.validation, losses["loss/val"]
        rows = spread_rows(validation.rows, self.config.train.eval_sequences)
        bigram = bigram_loss(self.data.train.rows.reshape(-1), rows, self.config.model.vocab_size)
        train = _last_value(self.run_dir / "metrics.jsonl", "loss/train")
        causal = []
        if self.config.depth is not None:
            method = self.model.causal_method(True)
            causal = [("causal loss", f"{losses['loss/val_causal']:.4f}  (routed by the {method}, as in sampling)")]
        return table(
            [
                ("train loss", f"{train:.4f}" if train is not None else "not logged"),
                ("validation loss", f"{loss:.4f}  (a bigram model: {bigram:.4f})"),
                *causal,
                ("perplexity", f"{math.exp(min(loss, 700)):.2f}"),
                ("bits per byte", f"{loss / math.log(2) / validation.bytes_per_token:.4f}"),
                ("tokens", f"{self.position['tokens']:,}"),
                ("training FLOPs", f"{self.position['flops']:.4e}"),
                ("time", f"{seconds:.0f} s"),
            ]
        )

    def _sample(self) -> str:
        """The same on every rank. Where blocks are collectives, without a cache: then every rank enters every block."""
        length = self.config.model.sequence_length
        num_prompt = min(SAMPLE_PROMPT_TOKENS, length // 2)
        prompt = torch.from_numpy(self.data.validation.rows[:1, :num_prompt].astype("int64")).to(self.device)
        ep_size = self.config.experts.ep_size if self.config.experts is not None else 1
        with uncompiled(self.config.train.compile):
            ids = self.model.generate(
                prompt,
                min(SAMPLE_NEW_TOKENS, length - num_prompt),
                temperature=0.8,
                use_cache=ep_size == 1 and self.run.engine.zero_stage < 3,
                seed=self.config.seed,
            )
        return self.data.tokenizer.decode(ids[0].tolist())

    def _commands(self) -> str:
        return (
            f"compare runs: tensorboard --logdir {self.run_dir.parent}\n"
            f"resume:       deepspeed train.py --deepspeed_config {self.run_dir / 'config.json'} "
            f"--output_dir {self.run_dir} --resume auto"
        )


def _lock(run_dir: Path, rank: int) -> FileLock:
    """Keeps a second run out of the directory. Held until the process ends, however it ends."""
    lock = FileLock(run_dir / ".lock", timeout=0)
    problems: list[str | None] = [None]
    if rank == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            problems = [f"{run_dir} is in use by another run; wait for it, or name another directory"]
        except OSError as error:
            problems = [f"{run_dir} cannot be written to: {error.strerror or error}; name another directory"]
    distributed.broadcast_object_list(problems)
    if problems[0] is not None:
        raise ConfigError("--output_dir", problems[0])
    return lock


def _start_from(model: ModeTransformer, folder: str, tokenizer: Tokenizer) -> None:
    """Gives a new run's model the weights of an exported folder; one of another model or tokenizer is refused."""
    check_same_model(model.config, folder)
    if not tokenizer.same_as(Tokenizer.load(folder)):
        raise ConfigError(
            "mode.train.init_from",
            f"{folder} was trained with another tokenizer than this run's, so its tokens mean something else; use its "
            f'own: set mode.data.tokenizer to "pretrained" and mode.data.pretrained to {show(folder)}',
        )
    model.load_pretrained(folder)


def _check_same_run(found: Path, identity: dict[str, Any]) -> None:
    """A checkpoint of another model, corpus or batch is refused, naming the first difference."""
    saved = _flat(checkpoints.run_of(found))
    for path, value in _flat(identity).items():
        if saved.get(path, value) != value:
            raise ConfigError(
                path,
                f"is {value!r} but {saved[path]!r} in {found}; set it back, or start afresh with "
                "--resume never or another --output_dir",
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested dictionaries."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _last_value(metrics: Path, tag: str) -> float | None:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return next((row[tag] for row in map(json.loads, reversed(lines)) if tag in row), None)
