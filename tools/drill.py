"""Trains across two "hosts" on one machine: two network namespaces with an address each, joined by one link.

    python tools/drill.py

The DeepSpeed launcher is started once in each namespace, as on two nodes without ssh. The same training then
runs on one host with two ranks, and the losses of every step are compared. The bytes that left each
namespace show that the ranks talked over the link, which is the only one there is.

Needs root and `ip` (package iproute2); without them it says so and exits with 77. Exit code 0: the losses are
equal and bytes crossed; 1: they are not, or a training failed; 2: a wrong argument.

Knows nothing of the model: it writes a configuration, starts train.py and reads metrics.jsonl. It does not
show what needs two machines: other clocks, other disks, ssh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
EXIT_DIFFERENT, EXIT_SKIPPED = 1, 77  # 77 is what test harnesses take for "skipped"
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen inside the two namespaces only
INTERFACE = "drill0"
TOLERANCE = 1e-6  # relative


class Skipped(Exception):
    """This machine cannot make two hosts."""


class Failed(Exception):
    """A training ended badly."""


@dataclass
class Report:
    """What `--json` prints."""

    skipped: str | None = None
    failed: str | None = None
    ep_size: int = 2
    losses_two_hosts: list[float] = field(default_factory=list)
    losses_one_host: list[float] = field(default_factory=list)
    max_relative_difference: float | None = None
    bytes_sent: list[int] = field(default_factory=list)  # by host, over the link, during the training
    seconds_two_hosts: float = 0.0
    seconds_one_host: float = 0.0

    @property
    def passed(self) -> bool:
        equal = self.max_relative_difference is not None and self.max_relative_difference <= TOLERANCE
        return self.failed is None and equal and all(sent > 0 for sent in self.bytes_sent)


# ---------------------------------------------------------------------------------------------------
# Two hosts


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of two namespaces that reach each other and nothing else; gone afterwards, with their link."""
    ip = shutil.which("ip")
    if ip is None:
        raise Skipped("`ip` was not found; it comes with the package iproute2")
    if os.geteuid() != 0:
        raise Skipped("only root can make network namespaces")
    hosts = [f"drill-{os.getpid()}-{number}" for number in range(2)]
    made: list[str] = []
    try:
        for host in hosts:
            _ip("netns", "add", host)
            made.append(host)
        _ip("-n", hosts[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", hosts[1])
        for host, address in zip(hosts, ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", host, "link", "set", INTERFACE, "up")
            _ip("-n", host, "link", "set", "lo", "up")
        bytes_sent(hosts[0])  # entering a namespace needs more rights than making one
        yield hosts
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL, check=False)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise Skipped(f"`ip {' '.join(arguments)}` failed: {reason}")
    return done.stdout


def bytes_sent(host: str) -> int:
    """Over the link, since it was made."""
    return int(_ip("netns", "exec", host, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"))


# ---------------------------------------------------------------------------------------------------
# Training


def write_inputs(folder: Path, steps: int, ep_size: int) -> Path:
    """A small corpus and a small MoDE configuration; returns the configuration's path."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(12):
        lines = [f"{(number * 37 + i * i) % 97} tokens of text number {i}" for i in range(60)]
        (corpus / f"{number:02}.txt").write_text("\n".join(lines))
    document: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "mode": {
            "description": "A tiny model for the drill of two hosts",
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
                "ep_size": ep_size,
            },
            "depth": {"capacity_fraction": 0.25},
            "data": {
                "source": "files",
                "files": {"paths": [str(corpus / "*.txt")]},
                "tokenizer": "bytes",
                "cache_dir": str(folder / "cache"),
            },
            "train": {"steps": steps, "log_every": 1, "eval_every": steps, "eval_sequences": 4, "save_every": steps},
        },
    }
    path = folder / "drill.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def train(config: Path, run_dir: Path, nodes: list[list[str]], interface: str, timeout: float) -> list[float]:
    """Trains with one launcher per entry of `nodes`; each entry is all that stands before `train.py`.

    Returns rank 0's loss of every step.
    """
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": interface,  # else gloo takes the address the host's name resolves to
        "OMP_NUM_THREADS": "1",  # the same on one host and on two, so that sums have the same order
    }
    script = [str(ROOT / "train.py"), "--deepspeed_config", str(config), "--output_dir", str(run_dir)]
    processes, logs = [], []
    try:
        for number, command in enumerate(nodes):
            logs.append(run_dir.with_name(f"{run_dir.name}.node{number}.log"))
            with logs[-1].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, *script],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a process group of its own, to be ended as one
                    )
                )
        in_time = _wait(processes, timeout)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # the group is empty: everything has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        output = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        why = f"the launchers exited with {codes}" if in_time else f"not finished after {timeout:g} s (--timeout)"
        raise Failed(f"{run_dir.name}: {why}; the end of their output:\n{output}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss/train"] for row in rows if "loss/train" in row]


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> bool:
    """Until all have ended, or one has failed and the others had a moment to say why. False: time is up."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed:
            deadline = min(deadline, time.monotonic() + 5)
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.1)
    return True


def launcher(hostfile: Path, *arguments: str) -> list[str]:
    """`deepspeed` of this Python's environment, whatever PATH says."""
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), *arguments]


def drill(folder: Path, steps: int, ep_size: int, timeout: float) -> Report:
    """Both trainings and their comparison."""
    report = Report(ep_size=ep_size)
    config = write_inputs(folder, steps, ep_size)
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    with two_hosts() as hosts:
        nodes = []
        for rank, host in enumerate(hosts):
            place = ["--no_ssh", "--node_rank", str(rank), "--master_addr", ADDRESSES[0], "--master_port", "29500"]
            nodes.append(["ip", "netns", "exec", host, *launcher(hostfile, *place)])
        before, started = [bytes_sent(host) for host in hosts], time.monotonic()
        report.losses_two_hosts = train(config, folder / "two_hosts", nodes, INTERFACE, timeout)
        report.seconds_two_hosts = round(time.monotonic() - started, 1)
        report.bytes_sent = [bytes_sent(host) - sent for host, sent in zip(hosts, before, strict=True)]
    started = time.monotonic()
    local = launcher(folder / "no_hostfile", "--num_accelerators", "2", "--master_port", str(_free_port()))
    report.losses_one_host = train(config, folder / "one_host", [local], "lo", timeout)
    report.seconds_one_host = round(time.monotonic() - started, 1)
    if not len(report.losses_two_hosts) == len(report.losses_one_host) == steps:
        found = f"{len(report.losses_two_hosts)} and {len(report.losses_one_host)}"
        raise Failed(f"{steps} steps were to be logged, but {found} were")
    pairs = zip(report.losses_two_hosts, report.losses_one_host, strict=True)
    report.max_relative_difference = max(abs(two - one) / abs(one) for two, one in pairs)
    return report


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------------------------------------------
# The command line


def render(report: Report) -> str:
    if report.skipped is not None:
        return f"skipped: {report.skipped}"
    if report.failed is not None:
        return f"failed: {report.failed}"
    lines = ["step   two hosts            one host"]
    for step, (two, one) in enumerate(zip(report.losses_two_hosts, report.losses_one_host, strict=True), 1):
        lines.append(f"{step:4}   {two:<18.15g}   {one:<18.15g}")
    sent = " and ".join(f"{number:,}" for number in report.bytes_sent)
    return "\n".join(
        [
            *lines,
            "",
            f"expert-parallel ranks         {report.ep_size}",
            f"largest relative difference   {report.max_relative_difference:.3g} (allowed: {TOLERANCE:g})",
            f"bytes sent over the link      {sent}",
            f"seconds                       {report.seconds_two_hosts} and {report.seconds_one_host}",
            "passed" if report.passed else "FAILED: the losses differ, or nothing crossed the link",
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=10, help="optimizer steps of each training (default: 10)")
    parser.add_argument(
        "--ep_size",
        type=int,
        choices=(1, 2),
        default=2,
        help="expert-parallel ranks: 2 sends every expert's tokens over the link (default), 1 gradients alone",
    )
    parser.add_argument(
        "--timeout", type=_positive, default=300, help="seconds that each training may take (default: 300)"
    )
    parser.add_argument("--folder", metavar="DIR", help="keep inputs, logs and runs in this new or empty folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a whole number of at least 1")
    return int(text)


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # an exception, so that everything started is ended and everything made is removed


def main() -> int:
    parser = build_parser()
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if arguments.folder is not None and os.path.isdir(arguments.folder) and os.listdir(arguments.folder):
        parser.error(f"--folder {arguments.folder} is not empty; name another")
    with tempfile.TemporaryDirectory(prefix="drill-") as temporary:
        folder = Path(arguments.folder or temporary).absolute()
        try:
            report = drill(folder, arguments.steps, arguments.ep_size, arguments.timeout)
        except Skipped as reason:
            report = Report(skipped=str(reason), ep_size=arguments.ep_size)
        except Failed as reason:
            report = Report(failed=str(reason), ep_size=arguments.ep_size)
    print(json.dumps({**asdict(report), "passed": report.passed}, indent=2) if arguments.json else render(report))
    if report.skipped is not None:
        return EXIT_SKIPPED
    return 0 if report.passed else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
