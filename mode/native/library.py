"""Compiles the kernels for this machine, once, and loads them. Knows nothing of what they compute.

The library is kept in the user's cache folder under a name that says what it was made of: the sources, the flags,
torch's version, the processor's vector instructions. So it is made anew when any of them changes, and home folders may
be shared.
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

from mode.host import default_cache_dir

SOURCES = Path(__file__).parent
VECTORS = {  # what torch computes with here, and how a compiler is told to
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
}


class Unavailable(Exception):
    """Why there is no library here, and what would help."""

    def __init__(self, reason: str, fix: str) -> None:
        self.reason, self.fix = reason, fix
        super().__init__(f"{reason}; {fix}")


@functools.cache
def why_not() -> Unavailable | None:
    """None: the kernels are there, as torch.ops.deepspeed_mode. Any number of processes may ask at once."""
    if sys.platform != "linux":
        return Unavailable(f"the kernels of CPUs are for Linux, and this is {sys.platform}", 'use "auto"')
    try:
        _load(_compiled())
    except Unavailable as reason:
        return reason
    except (OSError, RuntimeError, ValueError) as error:
        return Unavailable(f"the kernels of CPUs cannot be compiled or loaded ({_one_line(error)})", 'use "auto"')
    return None


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError:  # damaged, as by a disk that was full: made anew, and if that does not help, it is said
        library.unlink(missing_ok=True)
        torch.ops.load_library(_compiled())


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
