"""Compiles the kernels for this machine, once, loads them, and tells torch what they return and cost.

The library is kept in the user's cache folder under a name that depends on the sources, the flags, torch's version and
the processor's vector instructions. So it is rebuilt when any of them changes, and home folders may be shared.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mode.config.section import ConfigError
from mode.host import default_cache_dir

Shape = tuple[int, ...]

SOURCES = Path(__file__).parent / "cpu"
VECTORS = {  # what torch computes with here, and how a compiler is told to
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
}


class Unavailable(Exception):
    """Why a way to compute cannot be used here, and what would help."""

    def __init__(self, reason: str, fix: str) -> None:
        self.reason, self.fix = reason, fix
        super().__init__(f"{reason}; {fix}")

    def for_setting(self, backend: str) -> ConfigError:
        """As an error of the setting that named the backend."""
        return ConfigError("experts.backend", f'is "{backend}"; {self.reason}; {self.fix}')


@functools.cache
def kernels_unavailable() -> Unavailable | None:
    """The reason; None: the kernels are there, as torch.ops.deepspeed_mode. Any number of processes may ask at once."""
    if sys.platform != "linux":
        return Unavailable(f"the kernels of CPUs are for Linux, and this is {sys.platform}", 'use "auto"')
    try:
        _load(_compiled())
    except Unavailable as reason:
        return reason
    except (OSError, RuntimeError, ValueError) as error:
        return Unavailable(f"the kernels of CPUs cannot be compiled or loaded ({_one_line(error)})", 'use "auto"')
    _register_shapes()
    _register_flops()
    return None


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError:  # corrupt, as by a full disk: rebuild once, then report
        library.unlink(missing_ok=True)
        torch.ops.load_library(_compiled())


def _register_shapes() -> None:
    """What each kernel returns, for tensors that have shapes and no values."""

    @torch.library.register_fake("deepspeed_mode::mix")
    def _(x: Tensor, choices: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        rows = torch.library.get_ctx().new_dynamic_size()  # how many choices are experts only their values tell
        return torch.empty_like(x), x.new_empty(rows, w1.shape[1]), x.new_empty(rows, w1.shape[1])

    @torch.library.register_fake("deepspeed_mode::mix_backward")
    def _(grad: Tensor, x: Tensor, choices: Tensor, gates: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in (x, gates, *rest[2:]))

    @torch.library.register_fake("deepspeed_mode::rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        return torch.empty_like(x), x.new_empty(len(x))

    @torch.library.register_fake("deepspeed_mode::rms_norm_backward")
    def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return torch.empty_like(x), torch.empty_like(weight)

    @torch.library.register_fake("deepspeed_mode::rotate")
    def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("deepspeed_mode::rotate_backward")
    def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        num_rows, slots, num_q, width = grad_q.shape
        return grad_q.new_empty(num_rows, slots, num_q + 2 * grad_k.shape[2], width)

    @torch.library.register_fake("deepspeed_mode::route")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int) -> tuple[Tensor, ...]:
        logits = x.new_empty(len(x), len(weight))
        choices = x.new_empty(len(x), top_k, dtype=torch.int64)
        return logits, torch.empty_like(logits), choices, x.new_empty(len(x), top_k)

    @torch.library.register_fake("deepspeed_mode::route_backward")
    def _(
        grad_gates: Tensor,
        grad_scores: Tensor | None,
        grad_logits: Tensor | None,
        x: Tensor,
        weight: Tensor,
        scores: Tensor,
        choices: Tensor,
    ) -> tuple[Tensor, ...]:
        return torch.empty_like(x), torch.empty_like(weight)

    @torch.library.register_fake("deepspeed_mode::score_backward")
    def _(grad_score: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.empty_like(x), torch.empty_like(weight)

    @torch.library.register_fake("deepspeed_mode::cross_entropy")
    def _(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, ...]:
        return logits.new_empty(len(logits)), logits.new_empty(len(logits)), logits.new_empty(len(logits))

    @torch.library.register_fake("deepspeed_mode::cross_entropy_backward")
    def _(grad: Tensor, logits: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(logits)


def _register_flops() -> None:
    """The products of each kernel for torch's FlopCounterMode, which does not look inside."""
    ops = torch.ops.deepspeed_mode

    @register_flop_formula(ops.mix)
    def _(x: Shape, *shapes: Shape, out_shape: tuple[Shape, Shape, Shape], **_: object) -> int:
        rows, hidden_width = out_shape[1]
        return 3 * 2 * rows * hidden_width * x[1]

    @register_flop_formula(ops.mix_backward)
    def _(grad: Shape, x: Shape, choices: Shape, gates: Shape, projected: Shape, *shapes: Shape, **_: object) -> int:
        rows, hidden_width = projected
        return 6 * 2 * rows * hidden_width * x[1]

    @register_flop_formula(ops.route)
    def _(x: Shape, weight: Shape, *rest: object, **_: object) -> int:
        return 2 * x[0] * x[1] * weight[0]

    @register_flop_formula(ops.route_backward)
    def _(gates: Shape, scores: object, logits: object, x: Shape, weight: Shape, *rest: object, **_: object) -> int:
        return 2 * 2 * x[0] * x[1] * weight[0]

    @register_flop_formula(ops.score_backward)
    def _(grad_score: Shape, x: Shape, weight: Shape, **_: object) -> int:
        return 2 * 2 * x[0] * x[1]


def _compiled() -> Path:
    vectors = torch.backends.cpu.get_cpu_capability()
    sources = [*sorted(SOURCES.glob("*.h")), *sorted(SOURCES.glob("*.cpp")), Path(__file__)]  # it has the flags
    made_of = [path.read_text() for path in sources]
    made_of += [torch.__version__, vectors, os.uname().machine]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]
    library = default_cache_dir() / "native" / f"{key}.so"
    if library.exists():
        return library
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        fix = 'install one (CXX names another than c++), or use "auto"'
        raise Unavailable(f"there is no C++ compiler ({compiler[0]})", fix)
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():  # else another process has made it in the meantime
            print("compiling kernels for this CPU, once: some 20 s", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / "native.so"
                _compile(compiler, vectors, made)
                made.replace(library)
    return library


def _compile(compiler: list[str], vectors: str, library: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    known = [f"-DCPU_CAPABILITY_{vectors}", *VECTORS[vectors].split()] if vectors in VECTORS else []
    command = [
        *compiler,
        *("-shared", "-fPIC", "-O3", "-std=c++20", "-fopenmp"),
        f"-DCPU_CAPABILITY={vectors if known else 'DEFAULT'}",
        *known,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{torch_folder / 'include'}",
        str(SOURCES / "library.cpp"),
        f"-L{torch_folder / 'lib'}",
        *("-ltorch_cpu", "-lc10"),
        *("-o", str(library)),
    ]
    in_english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=in_english)
    if done.returncode:
        problems = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
        said = next((line for line in problems if "collect2" not in line), f"exit code {done.returncode}")
        raise Unavailable(
            f"the kernels of CPUs do not compile here ({_one_line(said)})", 'use another compiler (CXX), or "auto"'
        )


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
