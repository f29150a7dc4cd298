"""Settings for all tests."""

import os

import hypothesis
import pytest

# Some virtual machines advertise AMX and then refuse its instructions: a bfloat16 product would end the
# process with "illegal instruction". Must be set before torch is imported, and reaches child processes.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# The tests' tensors are tiny: a second thread only waits, and a great deal when the machine is busy.
os.environ["OMP_NUM_THREADS"] = "1"

# A shared machine stalls now and then: a deadline per example would fail tests for no fault of theirs.
hypothesis.settings.register_profile("mode", deadline=None, derandomize=True)
hypothesis.settings.load_profile("mode")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes share the whole suite: many tests wait for ranks to start. What is named alone needs no second."""
    return 0 if config.option.file_or_dir else 2
