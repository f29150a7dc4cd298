"""`tools/generate.py` and `tools/evaluate.py` as a user meets them, on a tiny run and its export."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mode.data import spread_rows
from mode.data.tokenizer import byte_tokenizer
from mode.tooling import choose_device
from mode.training.checkpoints.load import load_model, load_with_text
from mode.training.logging.summary import sample
from mode.transformer.generation.cached import CachedDecoder
from mode.transformer.generation.page import colour, ink
from mode.transformer.generation.show import to_html, to_terminal, token_routes
from mode.transformer.generation.text import TextStream
from mode.transformer.model import ModeTransformer
from tests import launch
from tests.helpers import make_config, spread_weights
from tests.routing_tool.models import routing
from tools import evaluate, export, gain, generate

ENVIRONMENT = os.environ | {"PYTHONPATH": str(launch.ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a finished run and its export."""
    folder = tmp_path_factory.mktemp("generate")
    config = launch.write_tiny(folder)
    launch.run(["--deepspeed_config", str(config), "--output_dir", str(folder / "run")], folder / "log")
    assert export.main([str(folder / "run"), str(folder / "out")]) == 0
    return folder


def command(tool: str, *arguments: str) -> list[str]:
    return [sys.executable, str(launch.ROOT / "tools" / tool), *arguments]


def json_of(capsys, *arguments: str) -> list[dict]:
    capsys.readouterr()
    assert generate.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys, tool, *arguments: str) -> str:
    assert tool.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_a_run_and_its_export_say_the_same_with_and_without_the_cache(world, capsys):
    run, exported = (json_of(capsys, str(world / name), "12 tok", "7", "") for name in ("run", "out"))
    uncached = json_of(capsys, str(world / "out"), "12 tok", "7", "", "--no_cache")
    for first, second, third in zip(run, exported, uncached, strict=True):
        assert first["new_tokens"] == second["new_tokens"] == third["new_tokens"]
    assert [row["prompt_tokens"] for row in run] == [6, 1, 1], "an empty prompt is the end-of-text token"
    alone = json_of(capsys, str(world / "out"), "7", "--max_new_tokens", "26")
    assert alone[0]["new_tokens"][:26] == run[1]["new_tokens"], "32 positions leave 26 beside the longest prompt"


def test_an_exported_folder_is_sampled_without_deepspeed_and_streams_prompt_and_text(world):
    code = (
        "import sys\nfrom tools import generate\n"
        "assert generate.main(sys.argv[1:]) == 0\nassert 'deepspeed' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(world / "out"), "12 tok", "--max_new_tokens", "5", "--go_on"],
        capture_output=True,
        env=ENVIRONMENT,
        cwd=launch.ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"12 tok") and done.stdout.endswith(b"\n") and len(done.stdout) > 10


def test_prompts_come_from_the_line_files_and_the_input_and_bytes_that_are_no_text_are_replaced_and_reported(world):
    (world / "prompt.txt").write_bytes(b"a\xffb\n")
    done = subprocess.run(
        command(
            "generate.py", str(world / "out"), b"c\xfe", "--file", str(world / "prompt.txt"), "--file", "-", "--json"
        )
        + ["--max_new_tokens", "0"],
        input=b"from the input",
        capture_output=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["prompt"] for row in rows] == ["c\ufffd", "a\ufffdb\n", "from the input"]
    assert [row["prompt_tokens"] for row in rows] == [4, 6, 14]
    assert all(row["text"] == "" and row["new_tokens"] == [] for row in rows)
    for name in (b"prompt 1", b"prompt.txt"):
        assert name + b" is not all UTF-8; other bytes were replaced by U+FFFD" in done.stderr


def test_the_interactive_prompt_answers_line_by_line_and_survives_interrupts_and_a_prompt_that_is_too_long(
    world, capsys, monkeypatch
):
    step, lines = CachedDecoder.step, iter(["12", "x" * 40, "interrupt me", "34"])
    asked: list[str] = []

    def answer(question: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        asked.append(line)
        return line

    def interrupted(self, ids):
        if asked[-1] == "interrupt me":
            raise KeyboardInterrupt
        return step(self, ids)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(CachedDecoder, "step", interrupted)
    assert generate.main([str(world / "out"), "--max_new_tokens", "4"]) == 0
    shown = capsys.readouterr()
    assert re.match(r"12.*\ninterrupt me.*\n34.*\n", shown.out, flags=re.DOTALL)
    assert "a prompt of 40 tokens and max_new_tokens = 4 make 44, more than mode.model.sequence_length" in shown.err
    assert shown.err.count("interrupted\n") == 1


def test_ctrl_c_leaves_what_was_said_and_ends_with_130(world):
    slow = (
        "import sys, time\nfrom mode.transformer.generation.cached import CachedDecoder\nfrom tools import generate\n"
        "step = CachedDecoder.step\n"
        "def slowly(self, ids):\n    time.sleep(0.3)\n    return step(self, ids)\n"
        "CachedDecoder.step = slowly\nsys.exit(generate.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow, str(world / "out"), "12 tok", "--go_on"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=launch.ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert process.stdout.read(7).startswith(b"12 tok"), "a token has come"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == b"interrupted\n" and out.endswith(b"\n")


def test_wrong_arguments_are_one_line(world, capsys, tmp_path):
    out = str(world / "out")
    assert "make 33, more than mode.model.sequence_length = 32" in fails(capsys, generate, out, "x" * 32)
    assert "top_p is 2.0; it must be above 0" in fails(capsys, generate, out, "x", "--top_p", "2")
    assert "max_new_tokens is -1" in fails(capsys, generate, out, "x", "--max_new_tokens", "-1")
    assert "does not exist; name a run directory" in fails(capsys, generate, str(tmp_path / "no"), "x")
    assert "holds no whole checkpoint" in fails(capsys, generate, str(tmp_path), "x")
    assert "exported model, which has no steps" in fails(capsys, generate, out, "x", "--step", "3")
    assert '--device: is "nowhere", which torch refuses' in fails(capsys, generate, out, "x", "--device", "nowhere")
    assert "--batch_size: is 0; it must be at least 1" in fails(capsys, evaluate, out, "--batch_size", "0")
    assert generate.main([out, "--file", str(tmp_path / "none.txt")]) == 4
    assert "reading or writing failed" in capsys.readouterr().err


def test_a_page_gets_its_folder_and_nothing_is_sampled_for_one_that_cannot_be(world, capsys, tmp_path):
    page = tmp_path / "not" / "yet" / "page.html"
    assert generate.main([str(world / "out"), "12", "--max_new_tokens", "2", "--html", str(page)]) == 0
    assert "<span" in page.read_text(encoding="utf-8")
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    for wrong, code, words in ((tmp_path, 2, "a folder; name a file"), (tmp_path / "file" / "x.html", 4, "file")):
        assert generate.main([str(world / "out"), "12", "--html", str(wrong)]) == code
        shown = capsys.readouterr()
        assert shown.out == "" and words in shown.err


def test_the_texts_are_out_even_if_the_page_cannot_be_written(world, capsys, tmp_path, monkeypatch):
    def full(*arguments: object, **options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    arguments = ["12", "--max_new_tokens", "2", "--json", "--html", str(tmp_path / "page.html")]
    assert generate.main([str(world / "out"), *arguments]) == 4
    shown = capsys.readouterr()
    assert json.loads(shown.out)[0]["prompt"] == "12" and "no space left" in shown.err


def test_evaluation_tells_all_three_losses_and_agrees_with_the_run(world, capsys):
    found = {}
    for name in ("run", "out"):
        assert evaluate.main([str(world / name), "--json", "--batch_size", "3"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    last = launch.metrics(world / "run")[-1]
    for figures in found.values():
        for name, places in figures["loss_by_position"].items():
            assert [(place["first"], place["last"]) for place in places] == [(1, 7), (8, 15), (16, 31)]
            whole = sum(place["loss"] * (place["last"] - place["first"] + 1) for place in places) / 31
            assert whole == pytest.approx(figures["loss"][name], rel=1e-12)
        assert figures["loss"].keys() == {"top_k", "predictor", "router"} and figures["sampling_by"] == "predictor"
        assert figures["loss"]["top_k"] == pytest.approx(last["loss/val"], rel=1e-6)
        assert figures["loss"]["predictor"] == pytest.approx(last["loss/val_causal"], rel=1e-6)
        block = figures["blocks"]["1"]
        assert block["kept"]["top_k"] == figures["target_kept"] == 0.25
        assert block["kept"]["predictor"] == pytest.approx(last["depth/kept_fraction_causal"])
        assert 0 < block["predictor_accuracy"] <= 1 and 0 < block["router_accuracy"] <= 1
    assert evaluate.main([str(world / "out"), "--sequences", "2"]) == 0
    shown = capsys.readouterr().out
    for words in ("loss, top-k", "loss, predictor", "loss, router logit", "kept, predictor", "predictor right"):
        assert words in shown
    assert "2 held-out sequences of 32 tokens" in shown and "by position, predictor" in shown


def test_the_loss_by_position_is_that_of_the_token_at_the_position(world, capsys):
    loaded, data = load_with_text(world / "out", None, device="cpu")
    rows = torch.as_tensor(spread_rows(data.validation.rows, 3)).long()
    with torch.no_grad():
        logits = loaded.model.eval()(rows, causal="predictor").logits
    losses = torch.stack([F.cross_entropy(logits[:, i - 1], rows[:, i]) for i in range(1, rows.shape[1])])
    assert evaluate.main([str(world / "out"), "--json", "--sequences", "3"]) == 0
    places = json.loads(capsys.readouterr().out)["loss_by_position"]["predictor"]
    assert [place["loss"] for place in places] == pytest.approx(
        [losses[first - 1 : last].mean().item() for first, last in ((1, 7), (8, 15), (16, 31))], rel=1e-5
    )


def test_the_loss_on_the_training_text_stands_beside_the_held_out_one(world, capsys):
    loaded, data = load_with_text(world / "out", None, device="cpu")
    rows = torch.as_tensor(spread_rows(data.train.rows, 3)).long()
    with torch.no_grad():
        logits = loaded.model.eval()(rows, causal="predictor").logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert evaluate.main([str(world / "out"), "--json", "--sequences", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["training_loss"] == pytest.approx(expected, rel=1e-5)
    assert evaluate.main([str(world / "out"), "--sequences", "3"]) == 0
    difference = figures["loss"]["predictor"] - figures["training_loss"]
    assert f"{figures['training_loss']:.4f}  (held out: {difference:+.4f})" in capsys.readouterr().out


def test_other_text_is_evaluated_by_the_model_s_own_tokenizer_and_without_its_corpus(world, capsys, tmp_path):
    copy = shutil.copytree(world / "out", tmp_path / "copy")
    about = json.loads((copy / "config.json").read_text())
    about["mode"]["data"]["files"]["paths"] = [str(tmp_path / "gone")]
    (copy / "config.json").write_text(json.dumps(about))
    texts = ["12 tokens of text number 7, seen elsewhere\n" * 2, "a second document " * 3]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.md").write_text(texts[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"body": texts[1]}).encode()))
    named = [str(tmp_path / "texts"), str(tmp_path / "b.jsonl.gz")]
    assert evaluate.main([str(copy), "--json", "--text", *named, "--text_column", "body"]) == 0
    figures = json.loads(capsys.readouterr().out)

    loaded = load_model(copy)
    ids = [id for text in texts for id in [*text.encode(), loaded.tokenizer.end_of_text]]
    rows = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    with torch.no_grad():
        logits = loaded.model.eval()(rows, causal="predictor").logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert figures["loss"]["predictor"] == pytest.approx(expected, rel=1e-5)
    bytes_per_token = sum(map(len, texts)) / len(ids)
    assert figures["bits_per_byte"]["predictor"] == pytest.approx(expected / math.log(2) / bytes_per_token, rel=1e-5)
    assert (figures["sequences"], figures["text"], figures["training_loss"]) == (len(rows), named, None)
    assert evaluate.main([str(copy), "--text", *named, "--text_column", "body"]) == 0
    shown = capsys.readouterr().out
    assert f"{len(rows)} sequences of {named[0]} and 1 more, of 32 tokens" in shown and "training text" not in shown
    assert 'gone: no file matches this entry of "files.paths"' in fails(capsys, evaluate, str(copy))
    assert "--text_column: is for the tables of --text" in fails(capsys, evaluate, str(copy), "--text_column", "body")
    (tmp_path / "short.txt").write_text("short")
    message = fails(capsys, evaluate, str(copy), "--text", str(tmp_path / "short.txt"))
    assert "short.txt: holds 6 tokens, but one sequence of the model needs 32; add text" in message


def test_the_device_is_cuda_where_there_is_one(world, capsys, monkeypatch):
    out = str(world / "out")
    assert choose_device(None) == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(None) == "cuda" and choose_device("cpu") == "cpu"
    if torch.backends.cuda.is_built() and torch.cuda.device_count():
        return
    for tool, more in ((evaluate, []), (generate, ["x"]), (gain, [out]), (routing, [])):  # there is none, after all
        assert '--device: is "cuda", which torch refuses' in fails(capsys, tool, out, *more)


def test_a_model_with_a_capacity_is_evaluated_with_training_s_dropping_too(world, capsys, tmp_path):
    copy = shutil.copytree(world / "out", tmp_path / "copy")
    about = json.loads((copy / "config.json").read_text())
    about["mode"]["experts"]["capacity_factor"] = 0.25
    (copy / "config.json").write_text(json.dumps(about))
    assert evaluate.main([str(copy), "--json", "--sequences", "3", "--batch_size", "3"]) == 0
    losses = json.loads(capsys.readouterr().out)["loss"]
    assert evaluate.main([str(world / "out"), "--json", "--sequences", "3", "--batch_size", "3"]) == 0
    assert losses | json.loads(capsys.readouterr().out)["loss"] == losses, "nothing is dropped otherwise"

    loaded, data = load_with_text(copy, None, device="cpu")
    rows = torch.as_tensor(spread_rows(data.validation.rows, 3)).long()
    with torch.no_grad():  # in training mode nothing else of this model differs
        out = loaded.model.train()(rows, causal="predictor")
    assert not out.routing[0].experts.processed_TK[out.routing[0].experts.choices_TK < 4].all(), "something is dropped"
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert losses["dropping"] == pytest.approx(expected, rel=1e-5) and losses["dropping"] != losses["predictor"]
    assert evaluate.main([str(copy), "--sequences", "3", "--batch_size", "3"]) == 0
    shown = capsys.readouterr().out
    assert "loss, dropping as in training" in shown and "kept, dropping" not in shown


def test_evaluation_refuses_text_that_has_changed(world, capsys, tmp_path):
    about = json.loads((world / "out" / "config.json").read_text())
    about["mode"]["data"]["tokenizer"] = "bpe"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (world / "out").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "config.json").write_text(json.dumps(about))
    assert "another tokenizer than the model was trained with" in fails(capsys, evaluate, str(copy))


class Page(HTMLParser):
    """The spans of a page: (classes, title, text)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.spans: list[list[str]] = []
        self.links: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links += [found[name] for name in ("src", "href") if name in found]
        self.inside = tag == "span" and "title" in found
        if self.inside:
            self.spans.append([found.get("class", ""), found["title"], ""])

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.spans[-1][2] += data


def test_routes_are_shown_in_the_terminal_and_as_a_page_of_its_own(world, capsys, tmp_path, monkeypatch):
    page = tmp_path / "routes.html"
    arguments = [
        str(world / "out"),
        "12 <b>&",
        "--max_new_tokens",
        "8",
        "--go_on",
        "--show_routing",
        "--html",
        str(page),
    ]
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "\x1b[48;2;" in shown and "background: processed by" in shown and "underlined:" in shown
    text = page.read_text(encoding="utf-8")
    assert "<title>out</title>" in text and str(world) not in text, "the model's name, not where it is"
    parsed = Page(text)
    assert "".join(text for _, _, text in parsed.spans).replace("\u21b5", "").startswith("12 <b>&")
    assert parsed.links == [], "it needs no other file"
    assert sum("new" in classes.split() for classes, _, _ in parsed.spans) <= 8
    assert all(
        re.match(r"processed by [12] of 2 blocks: 0(, 1)?; \d of \d choices", title) for _, title, _ in parsed.spans
    )


def test_routes_have_no_colour_codes_where_the_output_is_no_terminal_or_the_user_wants_none(world, capsys, monkeypatch):
    arguments = [str(world / "out"), "12 <b>", "--max_new_tokens", "8", "--go_on", "--show_routing"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    capsys.readouterr()
    assert generate.main(arguments) == 0
    piped = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate.main(arguments) == 0
    assert capsys.readouterr().out == piped and "\x1b" not in piped
    assert piped.startswith("12 <b>")
    tokens = re.findall(r"^  '.*'  +processed by [12] of 2 blocks: 0(?:, 1)?; \d of \d choices", piped, re.MULTILINE)
    assert len(tokens) > 6, "the numbers of every token instead"


def test_text_is_printed_without_control_characters_and_json_has_it_as_it_is(world, capsys):
    wild, tame = "a\x1b[31m\x9b\r\x00\x7f\tb\n\u00a0", "a\ufffd[31m\ufffd\ufffd\ufffd\ufffd\tb\n\u00a0"
    few = ["--max_new_tokens", "0"]
    capsys.readouterr()
    for prompts, shown in (([wild], f"{tame}\n"), ([wild, "b"], f"--- 1 of 2\n{tame}\n--- 2 of 2\nb\n")):
        assert generate.main([str(world / "out"), *prompts, *few]) == 0
        assert capsys.readouterr().out == shown
    assert json_of(capsys, str(world / "out"), wild, *few)[0]["prompt"] == wild
    config = make_config(model={"vocab_size": 257})
    data = SimpleNamespace(validation=SimpleNamespace(rows=np.full((1, 16), 27)), tokenizer=byte_tokenizer())
    run = SimpleNamespace(mode=config, engine=SimpleNamespace(zero_stage=1))
    text = sample(ModeTransformer(config), run, data, torch.device("cpu"))  # of a run's end
    assert text.startswith("\ufffd" * 8) and "\x1b" not in text


def test_an_export_is_called_by_the_name_of_its_run(world, capsys, tmp_path):
    assert export.main([str(world / "run"), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  model +run$", shown, re.MULTILINE) and "A tiny model for tests" not in shown


def test_the_colours_follow_the_records():
    config = make_config(
        model={"vocab_size": 257, "num_layers": 4},
        experts={"num_no_ops": 2, "no_op_fraction": 0.25},
        depth={"capacity_fraction": 0.5, "predictor": {"width": 8}},
    )
    model = spread_weights(ModeTransformer(config), scale=0.4).eval()
    ids = list(b"some bytes here")
    routes = token_routes(model, byte_tokenizer(), ids, num_prompt=4)
    routing = model(torch.tensor([ids]), causal=True).routing
    kept = torch.stack([torch.ones(15) if r.depth is None else r.depth.kept_BL()[0].float() for r in routing])
    assert [len(token.blocks) for token in routes.tokens] == kept.sum(dim=0).tolist()
    assert routes.processed == kept.sum(dim=1).tolist()
    assert sum(token.no_ops for token in routes.tokens) == sum(int(r.experts.num_no_op()) for r in routing)
    assert sum(token.choices for token in routes.tokens) == sum(r.experts.choices_TK.numel() for r in routing)
    assert [token.is_prompt for token in routes.tokens] == [True] * 4 + [False] * 11
    darkest = max(routes.tokens, key=lambda token: len(token.blocks))
    assert routes.level(darkest) > 0 and "".join(token.text for token in routes.tokens) == "some bytes here"


def test_models_that_route_less_are_shown_too():
    for kind, words in (
        ({}, "routes nothing"),
        ({"experts": {}}, "routes nothing"),
        ({"experts": {"num_no_ops": 1, "no_op_fraction": 0.25}}, "no-op choices"),
        ({"depth": {}}, "processed by"),
    ):
        model = ModeTransformer(make_config(model={"vocab_size": 257}, **kind)).eval()
        routes = token_routes(model, byte_tokenizer(), [65, 10, 27, 66], num_prompt=1)
        assert words in to_terminal(routes) and words in to_html([routes], "<title>")
        assert "\x1b[31" not in to_terminal(routes) and to_terminal(routes).count("\n") == 3
        assert "&lt;title&gt;" in to_html([routes], "<title>")


def test_every_colour_of_the_scale_is_legible_and_darker_than_the_one_before():
    def luminance(rgb: tuple[int, int, int]) -> float:
        linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    levels = [luminance(colour(step / 100)) for step in range(101)]
    assert all(a > b for a, b in zip(levels, levels[1:], strict=False))
    for step in range(101):
        light, dark = sorted([luminance(colour(step / 100)), luminance(ink(colour(step / 100)))], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_character_of_several_tokens_appears_once_and_whole():
    stream = TextStream(byte_tokenizer())
    text = "a\u00e9\u20ac\U0001f600z"
    assert [stream.add(byte) for byte in text.encode()] == [
        *("a", "", "\u00e9", "", "", "\u20ac", "", "", "", "\U0001f600", "z")
    ]
    assert stream.add(0xC3) == "" and stream.rest() == "\ufffd" and stream.rest() == ""
    broken = "".join(stream.add(byte) for byte in b"\xff\xff\xff\xff\xffok") + stream.rest()
    assert broken.endswith("ok") and broken.count("\ufffd") == 5
