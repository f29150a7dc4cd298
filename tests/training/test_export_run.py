"""Checkpoints of real runs to folders that load without DeepSpeed, and runs that start from such folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import load_file, save_file

from mode.config.section import ConfigError
from mode.training.checkpoints import checkpoint as checkpoints
from mode.training.checkpoints import unpickling
from mode.training.checkpoints.consolidate import full_weights
from tests import launch
from tools import export, generate

ROOT = Path(__file__).parent.parent.parent
IDS = torch.arange(64).view(2, 32) * 5 % 257


@dataclass(frozen=True)
class Case:
    """A layout of training whose checkpoints must export."""

    stage: int
    tied: bool = True
    precision: str = "fp32"
    ep_size: int = 1

    @property
    def name(self) -> str:
        return f"zero{self.stage}_{'tied' if self.tied else 'untied'}_{self.precision}_ep{self.ep_size}"


CASES = [
    Case(0),
    Case(0, tied=False, precision="bf16", ep_size=2),
    Case(1, tied=False, ep_size=2),
    Case(2, precision="bf16"),
    Case(3, ep_size=2),
]


def keep_logits() -> None:
    """At its end, the run writes what its own engine gives for some tokens."""
    from mode.training.loop.trainer import Trainer

    finish = Trainer._finish

    def write(self: Any) -> Any:
        self.engine.eval()
        with torch.no_grad():
            logits = self.engine(IDS).logits.clone()
        if self.rank == 0:
            save_file({"logits": logits}, self.run_dir / "logits.safetensors")
        return finish(self)

    Trainer._finish = write


def arguments(config: Path, run_dir: Path, *settings: str) -> list[str]:
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["--deepspeed_config", str(config), "--output_dir", str(run_dir), *sets]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A configuration, and beside it a run of two ranks and its export for every case."""
    folder = tmp_path_factory.mktemp("export")
    config = launch.write_tiny(folder)
    for case in CASES:
        settings = (
            f"zero_optimization.stage={case.stage}",
            f"mode.model.tied_head={json.dumps(case.tied)}",
            f"bf16.enabled={json.dumps(case.precision == 'bf16')}",
            "mode.train.stop_after=4",
            f"mode.experts.ep_size={case.ep_size}",
        )
        launch.run(arguments(config, folder / case.name, *settings), folder / f"{case.name}.log", 2, keep_logits)
        assert export.main([str(folder / case.name), str(folder / "out" / case.name)]) == 0
    return config, folder


LOAD = """
import json, pickle, sys
import torch
from safetensors.torch import save_file
from mode import ModeTransformer

class Refuse:
    def __init__(self, *args, **kwargs):
        raise AssertionError("unpickled")

torch.load = pickle.load = pickle.loads = pickle.Unpickler = Refuse
ids = torch.tensor(json.loads(sys.argv[1]))
for number, (folder, dtype) in enumerate(json.loads(sys.argv[3])):
    model = ModeTransformer.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, f"{sys.argv[2]}/{number}.safetensors")
assert "deepspeed" not in sys.modules
"""


def test_exported_logits_are_those_of_the_engine_in_a_process_without_deepspeed_that_cannot_unpickle(world, tmp_path):
    _, folder = world
    types = {"fp32": "float32", "bf16": "bfloat16"}
    jobs = json.dumps([(str(folder / "out" / case.name), types[case.precision]) for case in CASES])
    command = [sys.executable, "-c", LOAD, json.dumps(IDS.tolist()), str(tmp_path), jobs]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for number, case in enumerate(CASES):
        actual = load_file(tmp_path / f"{number}.safetensors")["logits"]
        expected = load_file(folder / case.name / "logits.safetensors")["logits"]
        assert actual.dtype == expected.dtype and expected.float().std() > 0.1
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=lambda m, name=case.name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_export_holds_the_float32_weights_of_the_optimizer_and_the_moved_biases(world, case):
    _, folder = world
    weights = load_file(folder / "out" / case.name / "model.safetensors")
    assert ("head.weight" in weights) is not case.tied
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    biases = [tensor for name, tensor in weights.items() if name.endswith("bias_J")]
    assert len(biases) == 2 and all(bias.abs().max() > 0.01 for bias in biases), "four steps have moved them"
    rounded = [torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values() if tensor.ndim > 1]
    assert not any(rounded), "more than the half-precision copy of the weights"


def test_a_checkpoint_that_lacks_an_expert_is_refused_by_name(world, tmp_path):
    _, folder = world
    shutil.copytree(folder / CASES[0].name / "checkpoints" / "step_00000004", tmp_path / "step_00000004")
    (tmp_path / "step_00000004" / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ConfigError, match=r"blocks.1.body.feed_forward.experts.w1: has 3072 entries where the model"):
        full_weights(tmp_path / "step_00000004")


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "export.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_the_tool_prints_its_figures_as_json_alone_on_stdout_and_halves_the_bytes_in_bf16(world, tmp_path):
    _, folder = world
    run_dir = folder / CASES[2].name
    done = tool(run_dir, tmp_path / "out", "--step", 3, "--dtype", "bf16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures["step"] == 3 and figures["dtype"] == "bf16"
    assert (figures["validation_step"], figures["validation_loss"]) == (None, None), "the first evaluation is at step 4"
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith("bias_J") else torch.bfloat16)
    assert figures["parameters"] == sum(t.numel() for name, t in weights.items() if not name.endswith("bias_J"))
    whole = (folder / "out" / CASES[2].name / "model.safetensors").stat().st_size
    assert figures["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size < 0.6 * whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing else is left behind"


def test_the_tool_takes_the_newest_whole_checkpoint_and_prints_a_table(world, tmp_path, capsys):
    _, folder = world
    run_dir = folder / CASES[0].name
    assert export.main([str(run_dir), str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    loss = launch.metrics(run_dir)[-1]["loss/val"]
    assert f"validation loss  {loss:.4f}\n" in printed and "step             4\n" in printed
    assert "zero0_tied_fp32_ep1" in printed and "from_pretrained(" in printed
    shutil.copytree(run_dir, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000004"
    with (newest / "mp_rank_00_model_states.pt").open("ab") as file:
        file.write(b"x")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "b"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 3 and "is damaged" in captured.err
    cases: list[tuple[list[object], str]] = [
        ([newest, tmp_path / "c"], "mp_rank_00_model_states.pt does not match the manifest; name another"),
        ([tmp_path / "run", tmp_path / "c", "--step", 5], "step_00000005 is not a complete checkpoint"),
        ([newest, tmp_path / "c", "--step", 3], "--step: is 3, but"),
        ([tmp_path / "nowhere", tmp_path / "c"], "nowhere does not exist; name a run directory"),
        ([tmp_path / "a", tmp_path / "c"], "holds no whole checkpoint"),
        ([run_dir, tmp_path / "a"], "is not empty; name another folder, or give --overwrite"),
        ([run_dir, run_dir, "--overwrite"], "which no export wrote"),
    ]
    for command, words in cases:
        assert export.main([str(part) for part in command]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
    assert not (tmp_path / "c").exists() and run_dir.exists()
    whole = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(whole + '{"step": 9, "loss/v')  # cut off by a kill
    assert export.main([str(run_dir), str(tmp_path / "a"), "--overwrite"]) == 0
    (run_dir / "metrics.jsonl").write_text(whole)
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert export.main([str(tmp_path / "run"), str(tmp_path / "c")]) == 2
    assert "name a checkpoint inside its run directory" in capsys.readouterr().err


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def plant(checkpoint: Path, file: Path, marker: Path) -> None:
    """Adds code to a file of a checkpoint."""
    save_again(checkpoint, file, {**torch.load(file, weights_only=False), "planted": Planted(marker)})


def save_again(checkpoint: Path, file: Path, state: Any) -> None:
    """Replaces a file of a checkpoint and makes the manifest match."""
    torch.save(state, file)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][file.name] = [file.stat().st_size, zlib.crc32(file.read_bytes())]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_code_planted_in_a_checkpoint_is_not_run_by_tools(world, tmp_path, monkeypatch, capsys, case):
    _, folder = world
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    kinds: dict[str, Path] = {}  # one file of each kind
    for file in sorted((folder / case.name / "checkpoints" / "step_00000004").glob("*.pt")):
        kinds[re.sub("[0-9]+", "", file.name)] = file
    for kind, original in kinds.items():
        run_dir, marker = tmp_path / kind, tmp_path / "marker"
        shutil.copytree(folder / case.name, run_dir)
        checkpoint = run_dir / "checkpoints" / "step_00000004"
        plant(checkpoint, checkpoint / original.name, marker)
        code, error = generate.main([str(run_dir), "def", "--max_new_tokens", "1"]), capsys.readouterr().err
        assert not marker.exists(), kind
        if "expert" in kind and case.stage > 0:
            continue  # a universal checkpoint takes them from elsewhere
        assert code == 2 and "names posix.mkdir" in error and "could run code and was not loaded" in error, error
        assert error.count("\n") == 1, error
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1", "as the user set it"


def test_a_checkpoint_cannot_have_files_written_outside_the_folder_of_a_conversion(world, tmp_path, capsys):
    _, folder = world
    run_dir = tmp_path / "run"
    shutil.copytree(folder / CASES[4].name, run_dir)
    checkpoint = run_dir / "checkpoints" / "step_00000004"
    for file in checkpoint.glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        shapes = state["param_shapes"][0]
        _, shape = shapes.popitem()
        state["param_shapes"][0] = {**shapes, str(tmp_path / "outside"): shape}
        save_again(checkpoint, file, state)
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 2
    assert "which mode never writes" in capsys.readouterr().err
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("ranks", (2, 1))
def test_code_planted_in_a_checkpoint_is_not_run_by_a_run_that_resumes_it_as_it_was_or_on_another_layout(
    world, tmp_path, ranks
):
    config, folder = world
    case = CASES[2]
    run_dir, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(folder / case.name, run_dir)
    checkpoint = run_dir / "checkpoints" / "step_00000004"
    for file in checkpoint.glob("*optim_states.pt"):
        plant(checkpoint, file, marker)
    settings = [f"zero_optimization.stage={case.stage}", "mode.model.tied_head=false", f"mode.experts.ep_size={ranks}"]
    job = launch.start(arguments(config, run_dir, *settings), tmp_path / "log", ranks)
    assert job.wait() == [2] * ranks, job.output()
    assert not marker.exists()
    assert "names posix.mkdir" in job.output() and "Traceback" not in job.output()


def test_what_deepspeed_saves_beside_tensors_is_loaded_at_any_precision(tmp_path):
    dynamic = {
        "init_scale": 2**16,
        "scale_window": 9,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": True,
    }
    state = {
        "fp16": CreateLossScaler(torch.half, 1.0, True, dynamic),  # which no CPU trains in
        "fp32": CreateLossScaler(torch.float32, 1.0, False, None),
        "stage": ZeroStageEnum.weights,
        "address": fragment_address(3, 4),
    }
    torch.save(state, tmp_path / "optim_states.pt")
    loaded = unpickling.load_file(tmp_path / "optim_states.pt")
    assert loaded["fp16"].__dict__ == state["fp16"].__dict__ and loaded["fp32"].__dict__ == state["fp32"].__dict__
    assert (loaded["stage"], loaded["address"]) == (state["stage"], state["address"])


def test_a_device_in_place_of_a_file_is_damage_and_is_not_read(tmp_path):
    (tmp_path / "states.pt").symlink_to("/dev/zero")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"step": 1, "run": {"mode": {"seed": 0}}, "files": {"states.pt": [8, 0]}})
    )
    assert "states.pt" in str(checkpoints.damage(tmp_path))


def evaluate_at_the_start() -> None:
    from mode.training.loop.trainer import Trainer

    train = Trainer.train

    def write(self: Any) -> Any:
        loss = self._validation_loss().loss
        if self.rank == 0:
            (self.run_dir / "start.json").write_text(json.dumps([self.position["step"], loss]))
        return train(self)

    Trainer.train = write


def test_a_run_starts_from_an_export_at_its_loss_and_resumes_from_its_own_checkpoints(world, tmp_path):
    config, folder = world
    source, run_dir = CASES[0].name, tmp_path / "run"
    exported = folder / "out" / source
    layout = ["zero_optimization.stage=3", "mode.experts.ep_size=2"]
    start = [*layout, f"mode.train.init_from={exported}", "mode.train.stop_after=1"]
    job = launch.run(arguments(config, run_dir, *start), tmp_path / "log", 2, before=evaluate_at_the_start)
    assert f"starting at step 0 with the weights of {exported}" in job.output()
    step, loss = json.loads((run_dir / "start.json").read_text())
    assert step == 0 and loss == pytest.approx(launch.metrics(folder / source)[-1]["loss/val"], rel=1e-6)
    gone = [*layout, f"mode.train.init_from={tmp_path / 'gone'}", "mode.train.stop_after=2"]
    job = launch.run(arguments(config, run_dir, *gone), tmp_path / "log2", 2, before=evaluate_at_the_start)
    assert "resuming from" in job.output() and "with the weights of" not in job.output()
    assert json.loads((run_dir / "start.json").read_text())[0] == 1


def test_a_run_refuses_an_export_of_another_model_or_tokenizer(world, tmp_path):
    config, folder = world
    exported = folder / "out" / CASES[0].name
    cases = [
        (["mode.model.rope_theta=500"], "mode.model.rope_theta: is 500.0 but 10000.0 in"),
        (["mode.data.tokenizer=bpe"], "was trained with another tokenizer than this run's"),
    ]
    for number, (settings, words) in enumerate(cases):
        start = arguments(config, tmp_path / "run", f"mode.train.init_from={exported}", *settings)
        job = launch.start(start, tmp_path / f"log{number}")
        assert job.wait() == [2], job.output()
        assert words in job.output() and "Traceback" not in job.output()
