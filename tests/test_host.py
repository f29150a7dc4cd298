"""What a process does with the machine, seen from outside: in processes of their own, as settings are per process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KEPT = """
from mode.host import keep_freed_memory
keep_freed_memory()
import torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
torch.empty(16_000_000).fill_(1.0)  # freed at once
print(resident() - before)
"""

CORES = """
from mode.host import share_the_cores
import os
share_the_cores()
print(os.environ["OMP_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT"))
"""


def run(script: str, **settings: str) -> str:
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MALLOC_MMAP_MAX_", "LOCAL_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment | settings, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc only")
def test_freed_memory_is_kept_unless_the_user_chose() -> None:
    size = 16_000_000 * 4
    assert int(run(KEPT)) > 0.9 * size
    assert int(run(KEPT, MALLOC_MMAP_MAX_="65536")) < 0.1 * size


def test_ranks_share_the_cores_unless_the_user_chose() -> None:
    cores = len(os.sched_getaffinity(0))
    assert run(CORES) == f"{cores} 10000"
    assert run(CORES, LOCAL_SIZE=str(cores)) == "1 10000"
    assert run(CORES, LOCAL_SIZE="0") == run(CORES, LOCAL_SIZE="") == f"{cores} 10000"
    assert run(CORES, OMP_NUM_THREADS="3", OMP_WAIT_POLICY="PASSIVE") == "3 None"


def test_ranks_share_the_cores_where_the_system_tells_no_affinity_as_macos() -> None:
    assert run(f"import os\ndel os.sched_getaffinity\n{CORES}") == f"{os.cpu_count()} 10000"
