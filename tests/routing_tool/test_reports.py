"""The files that `tools/routing.py` writes, on exported models and on a run that was trained; and its errors."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from mode.training.logging.recorder import _prune_events
from tests import launch
from tests.routing_tool.models import fails, open_model, report, routing
from tools import evaluate
from tools.routes import write

PICTURES = {
    "moe": {"experts"},
    "mod": {"decisions", "router_weights", "entropy"},
    "stochastic": {"decisions", "router_weights", "entropy"},
    "token_choice": {"decisions", "router_weights", "entropy", "experts"},
    "staged": {"decisions", "router_weights", "entropy", "experts"},
    "integrated": {"decisions", "entropy", "experts"},
    "both": {"decisions", "router_weights", "entropy", "experts"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was trained, as `train.py` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    config = launch.write_tiny(folder)
    settings = ["--set", "mode.train.steps=4", "--set", "mode.train.save_every=2"]
    launch.run(["--deepspeed_config", str(config), "--output_dir", str(folder / "run"), *settings], folder / "log")
    return folder / "run"


class Page(HTMLParser):
    """Images, other links, and the coloured text of a report."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.spans: list[list[str]] = []  # title, style, text
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.images += [found["src"]] if tag == "img" else []
        self.links += [found[name] for name in ("src", "href") if name in found and tag != "img"]
        self.inside = tag == "span" and "title" in found
        if self.inside:
            self.spans.append([found["title"], found["style"], ""])

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.spans[-1][2] += data


@pytest.mark.parametrize("name", PICTURES)
def test_every_kind_of_model_gets_the_pictures_it_has_something_for_and_a_page_of_its_own(world, capsys, name):
    capsys.readouterr()
    assert routing.main([str(world / name), "--sequences", "2", "--leak", "1", "--texts", "1"]) == 0
    shown = capsys.readouterr().out
    folder = world / f"{name}_routing"
    assert str(folder) in shown, "it says where"
    assert {file.stem for file in folder.glob("*.png")} == PICTURES[name]
    assert not list(folder.glob("events*")), "an exported folder has no TensorBoard"
    page = Page((folder / "routing.html").read_text(encoding="utf-8"))
    files = [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in page.images]
    assert sorted(files) == sorted(file.read_bytes() for file in folder.glob("*.png")) and page.links == []
    model, batches = open_model(world / name, 2, 2)
    text = bytes(id for id in batches[0].input_ids[0].tolist() if id < 256).decode(errors="replace")
    assert "".join(span[2] for span in page.spans).replace("\u21b5", "").strip("\ufffd") == text.strip("\ufffd")
    numbers = json.loads((folder / "routing.json").read_text())
    same = numbers["flops_per_token"]["min"] == numbers["flops_per_token"]["max"]
    assert same == (name == "moe") and (len({span[1] for span in page.spans}) == 1) == same
    assert (numbers["leak"] is None) == (model.config.depth is None)
    assert ("leak of top-k" in shown) == (model.config.depth is not None)
    assert ("load imbalance" in shown) == (model.config.experts is not None)


def test_pictures_go_where_the_run_has_its_own_events_and_make_no_run_where_it_has_none(tmp_path):
    assert write.to_tensorboard(tmp_path, 3, {}) is None and not list(tmp_path.iterdir())
    assert write.board_folder(tmp_path) == tmp_path, "without a config.json"
    for settings, folder in (
        ({"enabled": True}, tmp_path),
        ({"output_path": str(tmp_path / "all")}, tmp_path / "all" / tmp_path.name),
        ({"output_path": str(tmp_path / "all"), "job_name": "one"}, tmp_path / "all" / "one"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"tensorboard": settings}))
        assert write.board_folder(tmp_path) == folder


def test_a_run_its_steps_and_tensorboard_which_resuming_leaves_alone(run, capsys, tmp_path):
    newest = report(capsys, run, "--leak", 1)
    assert newest["model"].endswith("step_00000004") and newest["name"] == "run, step 4"
    page = (run / "routing" / "routing.html").read_text(encoding="utf-8")
    assert "<title>Routing of run, step 4</title>" in page and "<h1>Routing of run, step 4</h1>" in page
    assert newest["output"] == str(run / "routing") and Path(newest["tensorboard"]).parent == run
    assert newest["loss"]["top_k"] == pytest.approx(launch.metrics(run)[-1]["loss/val"], rel=1e-6)
    older = report(capsys, run / "checkpoints" / "step_00000002", "--leak", 0, "--output", tmp_path, "--no_tensorboard")
    assert older["tensorboard"] is None and len(list(run.glob("added_by_routing*"))) == 1
    assert (tmp_path / "routing.html").is_file() and older["leak"] is None
    again = report(capsys, run, "--step", 2, "--leak", 0)
    assert older["depth"] == again["depth"] and older["loss"] == again["loss"] != newest["loss"]
    drawn = {*PICTURES["both"], "predictor"}  # of a run there is also how its predictor was trained
    pngs = {name: (run / "routing" / f"{name}.png").read_bytes() for name in drawn}
    assert str(write.to_tensorboard(run, 2, pngs)) == again["tensorboard"]
    files = {file.name: file.read_bytes() for file in run.glob("added_by_routing*")}
    assert len(files) == 2, "the second report of step 2 took the place of the first"
    runs = EventMultiplexer(size_guidance={"images": 0}).AddRunsFromDirectory(str(run.parent)).Reload()
    assert runs.Runs().keys() == {run.name}, "no run beside the one that was trained"
    events = runs.GetAccumulator(run.name)
    own = {"routing/decisions"}
    assert set(events.Tags()["images"]) == {f"routing_report/{name}" for name in drawn} | own
    assert "loss/train" in events.Tags()["scalars"]
    assert min(files) < min(file.name for file in run.glob("events*")), "so that TensorBoard goes on in the run's file"
    for name in drawn:
        images = {image.step: image.encoded_image_string for image in events.Images(f"routing_report/{name}")}
        assert images.keys() == {2, 4} and images[2] == pngs[name]
    assert list(run.glob("events*"))
    for last_step in (2, 0):  # what resuming and starting afresh do
        _prune_events(run, last_step)
    assert not list(run.glob("events*"))
    assert files == {file.name: file.read_bytes() for file in run.glob("added_by_routing*")}


def test_what_is_empty_half_written_or_of_another_version_is_one_clear_line(run, world, capsys, tmp_path):
    assert "does not exist; name a run directory" in fails(capsys, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no whole checkpoint" in fails(capsys, tmp_path / "empty")
    half = tmp_path / "half"
    shutil.copytree(run, half)
    for step in (2, 4):
        next((half / "checkpoints" / f"step_{step:08d}").glob("*model_states.pt")).write_bytes(b"cut")
    assert "holds no whole checkpoint" in fails(capsys, half)
    assert "is damaged: " in fails(capsys, half, "--step", 4)
    (half / "checkpoints" / "step_00000004").rename(half / "checkpoints" / "step_00000004.incomplete")
    assert "is not a complete checkpoint" in fails(capsys, half, "--step", 4)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    manifest = other / "checkpoints" / "step_00000004" / "manifest.json"
    about = json.loads(manifest.read_text())
    about["run"].get("config", about["run"]["mode"])["of_tomorrow"] = 1
    about["run"]["mode"]["of_tomorrow"] = 1
    manifest.write_text(json.dumps(about))
    assert "of_tomorrow" in fails(capsys, other)
    exported = tmp_path / "exported"
    shutil.copytree(world / "moe", exported)
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"format_version": 99}))
    assert "format_version: is 99" in fails(capsys, exported)


def test_wrong_arguments_and_models_are_one_line(world, capsys):
    assert "is a dense model" in fails(capsys, world / "dense") and not (world / "dense_routing").exists()
    for name, value in (("sequences", 0), ("batch_size", 0), ("leak", -1), ("texts", -1)):
        assert f"--{name}: is {value}; it must be at least" in fails(capsys, world / "mod", f"--{name}", value)
    message = fails(capsys, world / "mod", "--causal", "predictor")
    assert '--causal: is "predictor"; this model decides by top_k or router' in message
    assert "which torch refuses" in fails(capsys, world / "mod", "--device", "abacus")
    (world / "taken").write_text("")
    assert f"--output: is {world / 'taken'}, no folder to write to" in fails(
        capsys, world / "mod", "--output", world / "taken"
    )


def test_without_matplotlib_there_is_one_line(world):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from tools import routing; sys.exit(routing.main(sys.argv[1:]))"
    )
    search = {"PYTHONPATH": f"{launch.ROOT}{os.pathsep}{launch.ROOT / 'tools'}"}
    command = [sys.executable, "-c", code, str(world / "mod")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | search)
    assert done.returncode == 2 and 'pip install "deepspeed-mode[plots]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_evaluation_of_chance_has_no_router_that_could_be_right(world, capsys):
    assert evaluate.main([str(world / "stochastic"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert all(block["router_accuracy"] is None for block in figures["blocks"].values())
    assert evaluate.main([str(world / "stochastic")]) == 0
    assert "sees the future" not in capsys.readouterr().out
    assert evaluate.main([str(world / "mod")]) == 0
    assert "sees the future" in capsys.readouterr().out
