"""The exported folder without any run: what is written comes back, and what is damaged is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mode.config.section import ConfigError
from mode.config.settings import ModeConfig
from mode.data.errors import DataError
from mode.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from mode.transformer.model import ModeTransformer
from mode.transformer.pretrained import FILES, check_same_model, read_config, save_pretrained
from tests.helpers import NO_OPS, make_config, spread_weights

ROOT = Path(__file__).parent.parent
VOCABULARY = {"vocab_size": 257}


def make_model(tied: bool = True) -> ModeTransformer:
    config = make_config(
        model={**VOCABULARY, "tied_head": tied},
        experts={**NO_OPS, "balance_bias": {}},
        depth={"predictor": {"width": 8}},
    )
    model = spread_weights(ModeTransformer(config)).eval()
    for number, buffer in enumerate(model.buffers()):
        buffer += torch.arange(len(buffer)) / 3 + number
    return model


def write(folder: Path, model: ModeTransformer, **options: bool) -> Path:
    byte_tokenizer().save(folder / "tokenizer")
    save_pretrained(folder / "out", model.config, model.weights(), folder / "tokenizer", **options)
    return folder / "out"


def some_ids() -> torch.Tensor:
    return torch.arange(32).view(2, 16) * 7 % 257


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_is_saved_comes_back_in_logits_configuration_and_ties(tmp_path, tied):
    model = make_model(tied)
    folder = write(tmp_path, model)
    loaded = ModeTransformer.from_pretrained(folder)
    assert not loaded.training and loaded.config == model.config
    assert (loaded.head.weight is loaded.embedding.weight) is tied
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        assert ("head.weight" in stored.keys()) is not tied  # noqa: SIM118
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not list(tmp_path.glob("*.incomplete"))


def test_a_chosen_type_applies_to_the_weights_and_leaves_the_selection_bias_in_float32(tmp_path):
    model = make_model()
    loaded = ModeTransformer.from_pretrained(write(tmp_path, model), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    biases = dict(loaded.named_buffers())
    assert len(biases) == 2 and all(torch.equal(bias, model.get_buffer(name)) for name, bias in biases.items())
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded(some_ids()).logits, model.to(torch.bfloat16)(some_ids()).logits)


def test_a_model_without_weights_is_built_without_drawing_any():
    with torch.device("meta"):
        model = ModeTransformer(make_model().config)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_folder_that_is_there_is_replaced_only_on_demand_and_only_if_an_export_wrote_it(tmp_path):
    model = make_model()
    folder = write(tmp_path, model)
    with pytest.raises(ConfigError, match=r"is not empty; name another folder, or give --overwrite"):
        write(tmp_path, model)
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
    write(tmp_path, model, overwrite=True)
    assert ModeTransformer.from_pretrained(folder).norm.weight[0] == 2.0
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds thesis.txt, which no export wrote"):
        write(tmp_path, model, overwrite=True)
    assert (folder / "thesis.txt").exists() and (folder / "model.safetensors").exists()


def test_an_export_that_fails_half_way_leaves_what_was_there(tmp_path):
    model = make_model()
    folder = write(tmp_path, model)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError):
        save_pretrained(folder, model.config, model.weights(), tmp_path / "tokenizer", overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(tmp_path.glob("*.incomplete"))


def change_config(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | changes))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def write_raw(folder: Path, changes: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Replaces tensors by a type that torch cannot save."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind, shape, content = changes.get(name) or ("F32", list(tensor.shape), tensor.numpy().tobytes())
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGE = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: is missing; name a folder"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    "no folder": (shutil.rmtree, "model.safetensors: is missing; name a folder that tools/export.py wrote"),
    "no version": (lambda f: (f / "config.json").write_text("{}"), "config.json: format_version: is missing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: file: is not valid JSON"),
    "newer": (lambda f: change_config(f, format_version=2), "format_version: is 2, written by mode 0.1.0"),
    "odd version": (lambda f: change_config(f, format_version="1"), 'format_version: is "1"'),
    "no section": (lambda f: change_config(f, mode=None), "config.json: mode: is null; it must be a JSON object"),
    "unknown setting": (
        lambda f: change_config(f, mode={"modle": {}}),
        'mode.modle: unknown key; did you mean "model"',
    ),
    "half a file": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "model.safetensors: file: cannot be read: ",
    ),
    "not safetensors": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04N."), "file: cannot be read: "),
    "missing": (
        lambda f: change_tensors(f, norm__weight=None),
        "norm.weight: is missing; it must be of shape [16]; the weights and config.json must come from one export",
    ),
    "extra": (lambda f: change_tensors(f, more=torch.zeros(2)), "more: is unknown to a model of this configuration"),
    "shape": (
        lambda f: change_tensors(f, norm__weight=torch.ones(17)),
        "norm.weight: has shape [17] where the configuration makes it [16]",
    ),
    "type": (
        lambda f: change_tensors(f, norm__weight=torch.ones(16, dtype=torch.int64)),
        "norm.weight: holds I64; it must be one of F64, F32, BF16, F16",
    ),
    "8 bits": (
        lambda f: change_tensors(f, norm__weight=torch.ones(16).to(torch.float8_e4m3fn)),
        "norm.weight: holds F8_E4M3; it must be one of",
    ),
    "4 bits": (
        lambda f: write_raw(f, {"norm.weight": ("F4", [16], bytes(8))}),
        "norm.weight: holds F4; it must be one of",
    ),
    "endless weights": (lambda f: endless(f / "model.safetensors"), "model.safetensors: is missing"),
    "endless configuration": (lambda f: endless(f / "config.json"), "config.json: is missing"),
    "long header": (
        lambda f: (f / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}"),
        "model.safetensors: file: cannot be read: ",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_naming_the_file_and_the_fix(tmp_path, kind):
    folder = write(tmp_path, make_model())
    injure, words = DAMAGE[kind]
    injure(folder)
    with pytest.raises(ConfigError) as caught:
        ModeTransformer.from_pretrained(folder)
    assert words in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "injure",
    (
        lambda f: endless(f / "tokenizer.json"),
        lambda f: endless(f / "tokenizer_config.json"),
        lambda f: (f / "tokenizer_config.json").write_text("[" * 100_000),
    ),
    ids=("endless tokenizer", "endless settings", "deep settings"),
)
def test_a_damaged_tokenizer_is_refused_naming_the_file(tmp_path, injure):
    folder = write(tmp_path, make_model())
    injure(folder)
    with pytest.raises(DataError, match=r"tokenizer(_config)?\.json: cannot be read as a"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(("umask", "mode"), ((0o022, 0o644), (0o007, 0o660), (0o077, 0o600)), ids=oct)
def test_all_files_of_an_export_may_be_read_by_whom_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        folder = write(tmp_path, make_model())
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(FILES, mode)


def changed(config: ModeConfig, path: str, value: object) -> ModeConfig:
    document = here = config.to_dict()
    *parents, last = path.split(".")
    for name in parents:
        here = here[name]
    here[last] = value
    return ModeConfig.from_dict(document)


def test_a_run_of_another_model_is_refused_and_one_that_trains_it_otherwise_is_not(tmp_path):
    model = make_model()
    folder = write(tmp_path, model)
    check_same_model(model.config, folder)
    for path, value in {
        "model.width": 32,
        "model.rope_theta": 5000.0,
        "experts.top_k": 1,
        "experts": None,
        "experts.balance_bias": None,
        "depth.gate": "tanh",
        "depth.predictor.width": 9,
    }.items():
        with pytest.raises(ConfigError) as caught:
            check_same_model(changed(model.config, path, value), folder)
        assert caught.value.path == f"mode.{path}", path
        assert "config.json, which mode.train.init_from names" in str(caught.value)
    for path, value in {
        "model.activation_checkpointing": True,
        "experts.balance_bias.rate": 0.01,
        "experts.balance_loss": {"weight": 0.5},
        "experts.z_loss_weight": 0.1,
        "depth.warmup_fraction": 0.5,
        "depth.predictor.weight": 0.5,
        "seed": 3,
    }.items():
        check_same_model(changed(model.config, path, value), folder)


def test_weights_are_copied_into_a_model_that_trains_in_its_own_type(tmp_path):
    source, target = make_model(), ModeTransformer(make_model().config)
    target.load_pretrained(write(tmp_path, source.to(torch.bfloat16)))
    assert {tensor.dtype for tensor in target.state_dict().values()} == {torch.float32}
    assert target.head.weight is target.embedding.weight
    assert all(torch.equal(tensor, source.state_dict()[name].float()) for name, tensor in target.state_dict().items())


def test_tokenizers_are_the_same_when_they_were_saved_and_loaded_and_not_when_trained_on_other_text(tmp_path):
    mine, other = (train_bpe([text * 50], 280) for text in ("what a day it was ", "some other words entirely "))
    mine.save(tmp_path)
    assert mine.same_as(type(mine).load(tmp_path)) and mine.same_as(train_bpe(["what a day it was " * 50], 280))
    assert not mine.same_as(other) and not mine.same_as(byte_tokenizer())


def test_the_configuration_can_be_read_alone(tmp_path):
    model = make_model()
    assert read_config(write(tmp_path, model)) == model.config


HELP = """
import runpy, sys
sys.argv = ["export.py", "--help"]
try:
    runpy.run_path("tools/export.py", run_name="__main__")
except SystemExit as end:
    assert end.code == 0 and "torch" not in sys.modules
"""


def test_the_tool_explains_itself_without_importing_torch():
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for word in ("--step", "--dtype", "--overwrite", "--json", "safetensors", "init_from"):
        assert word in result.stdout
