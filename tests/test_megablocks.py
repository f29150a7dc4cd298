"""MegaBlocks and the choice of a backend: without the package, with a broken one, and with the real one on a CPU.

The last needs the package's Python and Triton code, which installs without a GPU (docs/gpu.md): beside torch, or in a
folder that the environment variable MEGABLOCKS_PATH names. Without it those tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest
import torch

from mode.config.file import run_config_from_dict
from mode.config.section import ConfigError
from mode.data.tokenizer import byte_tokenizer
from mode.moe import experts, megablocks
from mode.moe.experts import PREFERENCE, ROW_EXPERTS, choose_backend
from mode.moe.layer import LocalMoE
from mode.ops import operators
from mode.ops.library import Unavailable
from mode.training.loop import engine
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import save_pretrained
from tests import launch, megablocks_cases
from tests.helpers import make_config, needs_kernels, spread_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PACKAGES = ("megablocks", "grouped_gemm")


@pytest.fixture(autouse=True)
def asked_afresh():
    """What was found out about this machine before is forgotten, and what a test pretends afterwards."""
    for function in (choose_backend, megablocks._package):
        function.cache_clear()
    yield
    for function in (choose_backend, megablocks._package):
        function.cache_clear()


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(megablocks, "find_spec", lambda name: None if name in PACKAGES else find_spec(name))


@pytest.fixture
def broken_package(tmp_path, monkeypatch):
    """Packages that are there but cannot be imported, as when they were built for another torch."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('raise OSError("undefined symbol:\\n _ZN3c10")')
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------
# Which backend


@pytest.mark.parametrize(
    ("dtype", "widths", "name", "reason"),
    [
        (torch.bfloat16, (16, 24), "grouped_mm", "megablocks is not installed"),
        (torch.float32, (16, 24), "grouped_mm", "megablocks is not installed"),
        (torch.float64, (16, 24), "loop", "megablocks is not installed; grouped_mm knows no float64"),
        (
            torch.float32,
            (16, 30),
            "loop",
            "megablocks is not installed; grouped_mm needs widths that are multiples",
        ),
    ],
    ids=["bf16", "fp32", "fp64", "width"],
)
def test_without_the_package_auto_takes_the_next_best_and_says_why(without_package, dtype, widths, name, reason):
    found, why = choose_backend("auto", GPU, dtype, widths)
    assert found == name and why.startswith(reason)


def test_a_module_put_in_the_package_s_place_is_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "megablocks", types.ModuleType("megablocks"))  # it has no specification
    assert choose_backend("auto", GPU, torch.bfloat16, (16, 24)) == ("grouped_mm", "megablocks is not installed")


def test_with_the_package_auto_takes_it_where_it_works_and_else_says_why_not(monkeypatch):
    monkeypatch.setattr(megablocks, "find_spec", lambda name: object())
    monkeypatch.setattr(megablocks, "_package", lambda: None)
    assert choose_backend("auto", GPU, torch.bfloat16, (16, 24)) == ("megablocks", "it is installed")
    assert choose_backend("auto", GPU, torch.bfloat16, (10, 30))[0] == "megablocks"  # takes any width
    assert choose_backend("auto", GPU, torch.float16, (16, 24)) == (
        "grouped_mm",
        "megablocks computes in bfloat16 only and this model is float16",
    )
    with pytest.raises(ConfigError, match="megablocks needs a CUDA GPU and this is a cpu device"):
        choose_backend("megablocks", CPU, torch.bfloat16, (16, 24))


def test_a_package_that_cannot_be_imported_is_passed_over_with_its_reason(broken_package):
    found, why = choose_backend("auto", GPU, torch.bfloat16, (16, 24))
    assert found == "grouped_mm"
    assert why == "megablocks cannot be imported (undefined symbol: _ZN3c10)"
    with pytest.raises(ConfigError, match="build it again: pip install") as caught:
        choose_backend("megablocks", GPU, torch.bfloat16, (16, 24))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["grouped_mm", "loop"])
def test_a_backend_that_is_named_is_the_one_taken(name):
    assert choose_backend(name, GPU, torch.bfloat16, (16, 24)) == (name, "as configured")


def test_every_backend_of_the_configuration_exists_and_auto_can_choose_each():
    for name in ("auto", *PREFERENCE):
        assert make_config(experts={"backend": name}).experts.backend in ROW_EXPERTS
    assert set(ROW_EXPERTS) == {"auto", *PREFERENCE}


def lack_a_compiler():
    return Unavailable("there is no C++ compiler", "install one")


@pytest.mark.parametrize(
    ("dtype", "compiles", "name"),
    [
        pytest.param(torch.float32, True, "native", marks=needs_kernels),
        pytest.param(torch.float64, True, "native", marks=needs_kernels),
        (torch.bfloat16, True, "grouped_mm"),
        (torch.float32, False, "grouped_mm"),
        (torch.float64, False, "loop"),
    ],
    ids=str,
)
def test_an_auto_layer_computes_what_the_backend_it_stands_for_computes(monkeypatch, dtype, compiles, name):
    if not compiles:
        for module in (experts, operators):
            monkeypatch.setattr(module, "kernels_unavailable", lack_a_compiler)
    x_TD = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    outputs = []
    for backend in ("auto", name):
        config = make_config(experts={"backend": backend})
        layer = spread_weights(LocalMoE(config.model.width, config=config.experts).to(dtype))
        outputs.append(layer(x_TD)[0])
    assert torch.equal(*outputs)


# ---------------------------------------------------------------------------------------------------
# Without the package


def test_naming_megablocks_without_the_package_is_one_line_with_the_install_command(without_package):
    config = make_config(experts={"backend": "megablocks"})
    layer = spread_weights(LocalMoE(config.model.width, config=config.experts).bfloat16())
    for ask in (
        lambda: choose_backend("megablocks", GPU, torch.bfloat16, (16, 24)),
        lambda: layer(torch.randn(5, 16).bfloat16()),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        message = str(caught.value)
        assert message.startswith('experts.backend: is "megablocks"; megablocks is not installed; pip install ')
        assert "docs/gpu.md" in message and 'or use "auto"' in message and "\n" not in message


def test_naming_megablocks_in_another_precision_than_bf16_is_refused_before_anything_starts():
    document = json.loads(json.dumps(launch.TINY))
    document["mode"]["experts"]["backend"] = "megablocks"
    with pytest.raises(ConfigError, match='mode.experts.backend: is "megablocks".* in a run in fp32; set bf16.enabled'):
        run_config_from_dict(document)
    run_config_from_dict({**document, "bf16": {"enabled": True}})


def test_a_float32_tensor_is_refused_by_name_and_not_by_a_kernel():
    weights = [torch.empty(2, 8, 8)] * 3
    with pytest.raises(ConfigError, match="bfloat16 only and this model is float32; enable bf16"):
        megablocks.megablocks_experts(torch.empty(3, 8), torch.tensor([1, 2]), *weights)


def test_neither_importing_mode_nor_a_step_on_a_cpu_imports_the_package(broken_package):
    code = (
        "import sys, torch\n"
        "from mode import ModeTransformer\n"
        "from tests.helpers import make_config\n"
        "model = ModeTransformer(make_config(experts={'backend': 'auto'})).bfloat16()\n"
        "model(torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64)).loss.backward()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megablocks', 'grouped_gemm', 'stk')])"
    )
    path = os.pathsep.join([str(broken_package), str(launch.ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_a_model_trained_with_megablocks_loads_and_runs_where_the_package_is_missing(without_package, tmp_path):
    config = make_config(model={"vocab_size": 257}, experts={"backend": "megablocks"})
    model = spread_weights(ModeTransformer(config))
    byte_tokenizer().save(tmp_path / "tokenizer")
    save_pretrained(tmp_path / "out", config, model.weights(), tmp_path / "tokenizer")
    loaded = ModeTransformer.from_pretrained(tmp_path / "out")
    assert loaded.config == config.with_backend("auto")
    assert loaded(torch.arange(8).view(1, 8)).logits.isfinite().all()


def pins(name: str) -> dict[str, str]:
    lines = (launch.ROOT / name).read_text().lower().replace("_", "-").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_gpu_environment_differs_from_the_tested_one_in_torch_and_what_it_brings_alone():
    tested, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert {name for name in tested.keys() & gpu.keys() if tested[name] != gpu[name]} == {"torch"}
    assert not tested.keys() - gpu.keys(), "it has all that the extra `dev` asks for"
    brought = {name for name in gpu.keys() - tested.keys() if not re.match(r"nvidia-.*-cu12|cuda-", name)}
    assert brought == {"triton", "stanford-stk", "setuptools"}


def test_the_install_command_of_the_error_and_of_the_page_are_one():
    command = megablocks.INSTALL.removesuffix(" (docs/gpu.md)")
    assert f"\n{command}\n" in (launch.ROOT / "docs" / "gpu.md").read_text()


# ---------------------------------------------------------------------------------------------------
# In a run


def find_less_on_rank_1() -> None:
    found = [("grouped_mm", "megablocks is not installed"), ("loop", "there is nothing else")]
    engine.choose_backend = lambda *_: found[int(os.environ["RANK"])]


def test_a_run_says_at_its_start_which_backend_it_took_and_all_ranks_take_the_same(tmp_path):
    path = launch.write_tiny(tmp_path)
    arguments = ["--deepspeed_config", str(path), "--output_dir", str(tmp_path / "run"), "--set", "mode.train.steps=1"]
    job = launch.run(arguments, tmp_path / "log", ranks=2, before=find_less_on_rank_1)
    assert "  experts          loop (there is nothing else on rank 1)\n" in job.output()
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["mode"]["experts"]["backend"] == "auto"  # another machine chooses anew


def pretend_the_package_is_missing() -> None:
    megablocks.find_spec = lambda name: None


def test_a_run_that_names_a_backend_the_machine_lacks_ends_with_one_line(tmp_path):
    path = launch.write_tiny(tmp_path)
    settings = ["--set", "mode.experts.backend=megablocks", "--set", "bf16.enabled=true"]
    arguments = ["--deepspeed_config", str(path), "--output_dir", str(tmp_path / "run"), *settings]
    job = launch.start(arguments, tmp_path / "log", before=pretend_the_package_is_missing)
    assert job.wait() == [2], job.output()
    assert 'error: mode.experts.backend: is "megablocks"; megablocks is not installed; pip install' in job.output()
    assert "Traceback" not in job.output()


# ---------------------------------------------------------------------------------------------------
# With the package's own Python and Triton code, interpreted


@pytest.fixture(scope="module")
def interpreted():
    """What came out of every case, in one process: Triton decides at its import whether to interpret."""
    folder = os.environ.get("MEGABLOCKS_PATH")
    if folder is None and not all(map(find_spec, ("megablocks", "stk", "triton"))):
        pytest.skip("megablocks, stanford-stk and triton are not installed; docs/gpu.md says how, without a GPU")
    path = os.pathsep.join(filter(None, [str(launch.ROOT), folder]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.megablocks_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", megablocks_cases.CASES)
def test_megablocks_own_code_equals_the_loop_in_outputs_and_every_gradient(interpreted, case):
    assert interpreted[case] == "same", interpreted[case]
