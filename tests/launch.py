"""Runs `train.py` as real processes, started quickly: they are forked from a server that has torch and
DeepSpeed imported. A process group, an engine, signals and kills are as real as anywhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mode.local_ranks import free_port

ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
# The first step of torch's optimizers imports part of its compiler, which takes most of a start.
SLOW = ["deepspeed", "torch", "torch._dynamo", "mode.training.loop.trainer"]
CONTEXT.set_forkserver_preload([*SLOW, "tests.launch", "train"])

TINY: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100000},
    "tensorboard": {"enabled": True},
    "mode": {
        "description": "A tiny model for tests",
        "model": {
            "vocab_size": 300,
            "num_layers": 2,
            "width": 32,
            "num_heads": 2,
            "num_kv_heads": 1,
            "ffn_width": 32,
            "sequence_length": 32,
        },
        "experts": {
            "num_experts": 4,
            "top_k": 1,
            "width": 32,
            "num_no_ops": 2,
            "no_op_fraction": 0.5,
            "balance_loss": {},
            "balance_bias": {"rate": 0.05},
            "z_loss_weight": 0.001,
        },
        "depth": {"capacity_fraction": 0.25, "warmup_fraction": 0.6, "predictor": {"width": 8}},
        "data": {"source": "files", "files": {"paths": ["corpus/*.txt"]}, "tokenizer": "bytes"},
        "train": {"steps": 12, "log_every": 1, "eval_every": 4, "eval_sequences": 5, "save_every": 3, "keep_last": 2},
    },
}


def write_tiny(folder: Path) -> Path:
    """A corpus and a configuration for it; returns the configuration's path."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(12):
        words = [f"{(number * 37 + i * i) % 97} tokens of text number {i}" for i in range(60)]
        (corpus / f"{number:02}.txt").write_text("\n".join(words))
    document = json.loads(json.dumps(TINY))
    document["mode"]["data"]["files"]["paths"] = [str(corpus / "*.txt")]
    document["mode"]["data"]["cache_dir"] = str(folder / "cache")
    path = folder / "tiny.json"
    path.write_text(json.dumps(document))
    return path


@dataclass
class Job:
    """Some ranks of one run."""

    processes: list[Any]
    logs: list[Path]

    def wait(self, seconds: float = 120) -> list[int]:
        """Exit codes of all ranks; a rank still alive after `seconds` is killed and fails the test."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        alive = [process for process in self.processes if process.is_alive()]
        for process in alive:
            process.kill()
            process.join()
        assert not alive, f"{len(alive)} ranks hung; output:\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()


def start(arguments: list[str], log: Path, ranks: int = 1, before: Callable[[], None] | None = None) -> Job:
    """Starts `train.py` on `ranks` processes; `before` runs first in each of them."""
    port = free_port()
    processes, logs = [], []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": str(ranks),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        logs.append(log.with_name(f"{log.name}.{rank}"))
        process = CONTEXT.Process(target=_main, args=(arguments, environment, str(logs[-1]), before))
        process.start()
        processes.append(process)
    return Job(processes, logs)


def run(arguments: list[str], log: Path, ranks: int = 1, before: Callable[[], None] | None = None) -> Job:
    """`start`, wait, and insist on success."""
    job = start(arguments, log, ranks, before)
    codes = job.wait()
    assert codes == [0] * ranks, f"exit codes {codes}; output:\n{job.output()}"
    return job


def _main(arguments: list[str], environment: dict[str, str], log: str, before: Callable[[], None] | None) -> None:
    import train

    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    if before is not None:
        before()
    code = train.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as a killed process would: no help from exit handlers


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def reproducible(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What must repeat to the bit: everything but the clock."""
    return [{tag: value for tag, value in row.items() if not tag.startswith("perf/")} for row in rows]
