"""`tools/routing.py` on a tiny run and on exported models of every kind; its numbers against plain loops."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mode import accounting
from mode.config import ModeConfig
from mode.data import prepare_data, spread_rows, validation_batches
from mode.data.tokenizer import byte_tokenizer
from mode.model.pretrained import save_pretrained
from mode.model.transformer import ModeTransformer
from mode.training.metrics import decision_image
from mode.training.recorder import _prune_events
from tests import launch
from tests.helpers import DEPTH, EXPERTS, MODEL, NO_OPS, spread_weights
from tools import routing
from tools.routes import figures, leak, write
from tools.routes.survey import survey, work

CPU = torch.device("cpu")
PREDICTOR = {"predictor": {"width": 8}}
KINDS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {  # experts, depth
    "dense": (None, None),
    "moe": ({}, None),
    "mod": (None, {}),
    "stochastic": (None, {"selection": "stochastic", "gate": "one"}),
    "token_choice": ({}, {"selection": "token_choice"}),
    "staged": ({}, PREDICTOR),
    "integrated": (NO_OPS, None),
    "both": (NO_OPS, PREDICTOR),
}
PICTURES = {
    "moe": {"experts"},
    "mod": {"decisions", "router_weights", "entropy"},
    "stochastic": {"decisions", "router_weights", "entropy"},
    "token_choice": {"decisions", "router_weights", "entropy", "experts"},
    "staged": {"decisions", "router_weights", "entropy", "experts"},
    "integrated": {"decisions", "entropy", "experts"},
    "both": {"decisions", "router_weights", "entropy", "experts"},
}


@pytest.fixture(scope="module", autouse=True)
def tools_on_the_path():
    """As for a script of that folder."""
    sys.path.append(str(launch.ROOT / "tools"))
    yield
    sys.path.remove(str(launch.ROOT / "tools"))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A corpus, and an exported folder of every kind of model with random weights."""
    folder = tmp_path_factory.mktemp("routing")
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(8):
        lines = [f"<b>{(number * 37 + i * i) % 97} & text \u00e9</b>" for i in range(60)]
        (corpus / f"{number}.txt").write_text("\n".join(lines))
    byte_tokenizer().save(folder / "tokenizer")
    for seed, (name, (experts, depth)) in enumerate(KINDS.items()):
        config = ModeConfig.from_dict(
            {
                "model": MODEL | {"vocab_size": 257, "num_layers": 4, "sequence_length": 24},
                "experts": None if experts is None else EXPERTS | experts,
                "depth": None if depth is None else DEPTH | depth,
                "data": {
                    "source": "files",
                    "files": {"paths": [str(corpus / "*.txt")]},
                    "tokenizer": "bytes",
                    "validation_fraction": 0.3,
                    "cache_dir": str(folder / "cache"),
                    "document_masking": name == "both",
                },
                "train": {"steps": 1},
            }
        )
        model = spread_weights(ModeTransformer(config), seed=seed)
        save_pretrained(folder / name, config, model.weights(), folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was trained, as `train.py` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    config = launch.write_tiny(folder)
    settings = ["--set", "mode.train.steps=4", "--set", "mode.train.save_every=2"]
    launch.run(["--deepspeed_config", str(config), "--output_dir", str(folder / "run"), *settings], folder / "log")
    return folder / "run"


def report(capsys, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert routing.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert routing.main([*map(str, arguments)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == shown.count("warning: ") + 1, "one line, after warnings"
    return shown


def open_model(folder: Path, num_rows: int, batch_size: int) -> tuple[ModeTransformer, list[Any]]:
    model = ModeTransformer.from_pretrained(folder)
    data = prepare_data(model.config)
    end = data.tokenizer.end_of_text if model.config.data.document_masking else None
    rows = spread_rows(data.validation.rows, num_rows)
    return model, list(validation_batches(rows, batch_size=batch_size, end_of_text=end))


def ranks_by_counting(values: list[float]) -> list[float]:
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def test_the_best_threshold_is_the_best_of_all() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 9)).astype(np.float32)
    kept = (logits >= np.sort(logits, axis=1)[:, -2:-1]).astype(np.int64)  # the two largest of each row
    found = figures.best_threshold(logits, kept)
    levels = [*logits.ravel(), np.inf]
    assert found["agrees"] == max(((logits >= level) == kept).mean() for level in levels) < 1
    assert ((logits >= found["logit"]) == kept).mean() == found["agrees"]
    assert figures.best_threshold(logits, np.zeros_like(kept))["agrees"] == 1  # nothing kept: above all of them


def test_the_rank_correlation_is_that_worked_out_by_hand_with_ties():
    assert figures.average_ranks([1, 2, 2, 3]).tolist() == [1, 2.5, 2.5, 4]
    assert figures.average_ranks([10, 30, 20, 20]).tolist() == [1, 4, 2.5, 2.5]
    # Deviations from the mean rank 2.5: -1.5 0 0 1.5 and -1.5 1.5 0 0; 2.25 / sqrt(4.5 * 4.5)
    assert figures.rank_correlation([1, 2, 2, 3], [10, 30, 20, 20]) == pytest.approx(0.5)
    assert figures.rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert figures.rank_correlation([1, 1, 1], [1, 2, 3]) is None


@pytest.mark.parametrize("shown", ("top_k", "predictor"))
def test_every_number_is_that_of_plain_loops_over_single_sequences(world, capsys, tmp_path, shown):
    found = report(
        capsys,
        world / "both",
        "--sequences",
        5,
        "--batch_size",
        3,
        "--causal",
        shown,
        "--output",
        tmp_path,
        "--leak",
        0,
    )
    model, batches = open_model(world / "both", 5, 1)
    config, length = model.config, 24
    causal: dict[str, bool | str] = {"top_k": False, "predictor": "predictor", "router": "router"}
    kept = {name: [0] * 4 for name in causal}
    losses = {name: 0.0 for name in causal}
    above, choices, flops = [0] * 4, [[0] * 5 for _ in range(4)], 0
    blocks, real, entropies = [], [], []
    for name, batch in ((name, batch) for name in causal for batch in batches):
        ids = batch.input_ids
        with torch.no_grad():
            out = model(ids, labels=ids, documents=batch.documents, causal=causal[name])
        losses[name] += float(out.losses["cross_entropy"]) / 5
        entered = [[0] * length for _ in range(4)]
        worked = [0] * length
        for layer, record in enumerate(out.routing):
            positions = record.placement.positions_BS[0].tolist()
            for slot, position in enumerate(positions):
                entered[layer][position] = 1
                for choice in record.experts.choices_TK[slot].tolist():
                    worked[position] += choice < 4
                    choices[layer][choice] += name == shown
            kept[name][layer] += len(positions)
            if record.depth is not None and name == shown:
                above[layer] += sum(1 / (1 + 2.718281828459045**-r) > 0.5 for r in record.depth.logits_BL[0].tolist())
        if name == shown:
            blocks += [entered[1][i] + entered[3][i] for i in range(length)]
            real += worked
            entropies += torch.distributions.Categorical(logits=out.logits[0].double()).entropy().tolist()
            flops += accounting.model_flops(config, [record.counts() for record in out.routing]).forward
    assert found["loss"] == pytest.approx(losses, rel=1e-5)
    for layer in (1, 3):
        block = found["depth"]["blocks"][str(layer)]
        assert block["kept"] == pytest.approx({name: kept[name][layer] / (5 * length) for name in causal})
        assert block["above_half"] == pytest.approx(above[layer] / (5 * length))
    assert found["depth"]["blocks"].keys() == {"1", "3"}
    assert found["depth"]["above_half"] == pytest.approx((above[1] + above[3]) / (10 * length))
    assert sum(found["depth"]["histogram"]["counts"]) == 10 * length
    assert sum(found["depth"]["histogram"]["counts"][20:]) == above[1] + above[3]
    for layer in range(4):
        block, load = found["experts"]["blocks"][str(layer)], choices[layer][:4]
        assert block["choices"] == choices[layer] and sum(choices[layer]) == 2 * kept[shown][layer]
        assert block["no_op_share"] == pytest.approx(choices[layer][4] / sum(choices[layer]))
        assert block["imbalance"] == pytest.approx(max(load) / (sum(load) / 4))
    assert found["flops_per_token"]["mean"] == pytest.approx(flops / (5 * length), rel=1e-9)
    assert found["entropy"]["mean"] == pytest.approx(np.mean(entropies), rel=1e-5)
    for name, counts in (("blocks", blocks), ("real_choices", real)):
        relation = found["entropy"]["by"][name]
        expected = np.corrcoef(ranks_by_counting(counts), ranks_by_counting(entropies))[0, 1]
        assert relation["rank_correlation"] == pytest.approx(expected, abs=2e-4), "entropies of float32 may swap ranks"
        assert {group["count"]: group["tokens"] for group in relation["groups"]} == {
            count: counts.count(count) for count in set(counts)
        }
        for group in relation["groups"]:
            of_group = [entropy for count, entropy in zip(counts, entropies, strict=True) if count == group["count"]]
            assert group["mean"] == pytest.approx(np.mean(of_group), rel=1e-5)
            assert group["quartiles"][1] == pytest.approx(np.median(of_group), rel=1e-5)
    assert json.loads((tmp_path / "routing.json").read_text()) == found


@pytest.mark.parametrize("name", ("mod", "token_choice", "integrated", "both"))
def test_the_heat_map_shows_what_training_shows(world, name):
    model, batches = open_model(world / name, 2, 2)
    for causal in (False, True):
        found = survey(model, batches, causal=causal, device=CPU, advance=lambda: None)
        with torch.no_grad():
            batch = batches[0]
            records = model(
                batch.input_ids, documents=batch.documents, sample_keys=batch.sample_ids, causal=causal
            ).routing
        for row in range(2):
            np.testing.assert_allclose(work(model.config, found, row), decision_image(records, row).numpy())


def full_and_prefix(folder: Path, causal: bool | str, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    model, batches = open_model(folder, 3, 2)
    full = survey(model, batches, causal=causal, device=CPU, advance=lambda: None).losses_NL
    given = {"causal": causal, "device": CPU, "advance": lambda: None}
    return full, leak.prefix_losses(model, batches, positions, **given)


@pytest.mark.parametrize(
    "name, causal", [("dense", False), ("integrated", False), ("mod", "router"), ("both", "predictor")]
)
def test_without_top_k_depth_routing_the_prefix_gives_the_loss_of_the_whole(world, name, causal):
    positions = leak.spread_positions(6, 24)
    full, prefix = full_and_prefix(world / name, causal, positions)
    np.testing.assert_allclose(prefix, full[:, positions], atol=2e-5)


def test_the_leak_is_the_loss_of_the_prefix_less_that_of_the_whole(world, capsys, tmp_path):
    found = report(capsys, world / "both", "--sequences", 3, "--batch_size", 2, "--output", tmp_path, "--leak", 6)[
        "leak"
    ]
    model, batches = open_model(world / "both", 3, 1)
    assert found["positions"] == [1, 5, 9, 13, 17, 21]
    gains, causal = np.zeros((3, 6)), np.zeros((3, 6))
    for row, batch in enumerate(batches):
        ids, documents = batch.input_ids, batch.documents
        for column, position in enumerate(found["positions"]):
            part, end = slice(0, position + 1), ids[0, position + 1]
            with torch.no_grad():
                whole = model(ids, documents=documents).logits[0, position].log_softmax(0)[end]
                prefix = model(ids[:, part], documents=documents[:, part]).logits[0, position].log_softmax(0)[end]
                alone = model(ids, documents=documents, causal="predictor").logits[0, position].log_softmax(0)[end]
            gains[row, column], causal[row, column] = whole - prefix, -alone
    assert np.abs(gains).max() > 0.01, "these weights leak"
    assert found["leak"] == pytest.approx(gains.mean(), abs=1e-5)
    assert found["leak"] == pytest.approx(found["top_k_prefix"] - found["top_k_full"], abs=1e-9)
    assert found["leak_by_position"] == pytest.approx(gains.mean(axis=0).tolist(), abs=1e-5)
    assert found["standard_error"] == pytest.approx(gains.mean(axis=1).std(ddof=1) / 3**0.5, abs=1e-5)
    assert found["causal_full"]["predictor"] == pytest.approx(causal.mean(), abs=1e-5)


def test_positions_of_the_leak_are_spread_and_have_a_next_token():
    assert leak.spread_positions(3, 10) == [1, 4, 7]
    assert leak.spread_positions(100, 4) == [0, 1, 2]
    assert leak.spread_positions(1, 2) == [0]


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


def test_tensorboard_files_stand_where_the_run_has_its_own(tmp_path):
    assert write.board_folder(tmp_path) == tmp_path / "routing", "without a config.json"
    for settings, folder in (
        ({"enabled": True}, tmp_path),
        ({"output_path": str(tmp_path / "all")}, tmp_path / "all" / tmp_path.name),
        ({"output_path": str(tmp_path / "all"), "job_name": "one"}, tmp_path / "all" / "one"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"tensorboard": settings}))
        assert write.board_folder(tmp_path) == folder / "routing"


def test_a_run_its_steps_and_tensorboard_which_resuming_leaves_alone(run, capsys, tmp_path):
    newest = report(capsys, run, "--leak", 1)
    assert newest["model"].endswith("step_00000004") and newest["output"] == newest["tensorboard"] == str(
        run / "routing"
    )
    assert newest["loss"]["top_k"] == pytest.approx(launch.metrics(run)[-1]["loss/val"], rel=1e-6)
    older = report(capsys, run / "checkpoints" / "step_00000002", "--leak", 0, "--output", tmp_path, "--no_tensorboard")
    assert older["tensorboard"] is None and len(list((run / "routing").glob("events*"))) == 1
    assert (tmp_path / "routing.html").is_file() and older["leak"] is None
    again = report(capsys, run, "--step", 2, "--leak", 0)
    assert older["depth"] == again["depth"] and older["loss"] == again["loss"] != newest["loss"]
    drawn = {*PICTURES["both"], "predictor"}  # of a run there is also how its predictor was trained
    pngs = {name: (run / "routing" / f"{name}.png").read_bytes() for name in drawn}
    assert write.to_tensorboard(run / "routing", 2, pngs) == run / "routing"
    files = {file.name: file.read_bytes() for file in (run / "routing").glob("events*")}
    assert len(files) == 2, "the second report of step 2 took the place of the first"
    events = EventAccumulator(str(run / "routing"), size_guidance={"images": 0}).Reload()
    assert set(events.Tags()["images"]) == {f"routing/{name}" for name in drawn}
    for name in drawn:
        images = {image.step: image.encoded_image_string for image in events.Images(f"routing/{name}")}
        assert images.keys() == {2, 4} and images[2] == pngs[name]
    own = len(list(run.glob("events*")))
    for last_step in (2, 0):  # what resuming and starting afresh do
        _prune_events(run, last_step)
    assert own and not list(run.glob("events*"))
    assert files == {file.name: file.read_bytes() for file in (run / "routing").glob("events*")}


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


def test_wrong_arguments_and_models_are_one_line(world, capsys, monkeypatch):
    assert "is a dense model" in fails(capsys, world / "dense") and not (world / "dense_routing").exists()
    for name, value in (("sequences", 0), ("batch_size", 0), ("leak", -1), ("texts", -1)):
        assert f"--{name}: is {value}; it must be at least" in fails(capsys, world / "mod", f"--{name}", value)
    message = fails(capsys, world / "mod", "--causal", "predictor")
    assert '--causal: is "predictor"; this model decides by top_k or router' in message
    assert "which torch refuses" in fails(capsys, world / "mod", "--device", "abacus")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "deepspeed-mode[plots]"' in fails(capsys, world / "mod")
