"""Compiles native.cpp for this machine, once, and loads it. Knows nothing of what is in it.

The library is kept in the user's cache folder under a name that says what it was made of: the source, torch's version,
the processor's vector instructions. So it is made anew when any of them changes, and home folders may be shared.
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
from mode.moe.backends.lack import Lack

SOURCE = Path(__file__).with_name("native.cpp")
VECTORS = {  # what torch computes with here, and how a compiler is told to
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
}
FIX = 'install one (CXX names another than c++), or use "auto"'


@functools.cache
def load_library() -> None:
    """Loads it, compiled if it has to be, or raises `Lack`. Any number of processes may call this at once."""
    if sys.platform != "linux":
        raise Lack("native", f"it is for Linux, and this is {sys.platform}", 'use "auto"')
    try:
        library = _compiled()
        torch.ops.load_library(library)
    except OSError as error:
        raise Lack("native", f"it cannot be compiled or loaded ({_one_line(error)})", 'use "auto"') from error


def _compiled() -> Path:
    vectors = torch.backends.cpu.get_cpu_capability()
    made_of = [SOURCE.read_text(), torch.__version__, vectors, os.uname().machine]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:24]
    library = default_cache_dir() / "native" / f"{key}.so"
    if library.exists():
        return library
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise Lack("native", f"there is no C++ compiler ({compiler[0]})", FIX)
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():  # else another process has made it in the meantime
            print("compiling the experts for this processor, once: some 20 s", file=sys.stderr, flush=True)
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
        str(SOURCE),
        f"-L{torch_folder / 'lib'}",
        *("-ltorch_cpu", "-lc10"),
        *("-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise Lack("native", f"it does not compile here ({_one_line(said)})", 'use another compiler (CXX), or "auto"')


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]
