"""What `tools/compare.py` refuses to compare, what a script may insist on, and what it writes."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tests import launch
from tests.compare_tool.written_runs import compare, fails, figures, power_law, write_rows, write_run


def test_other_tokens_are_compared_by_bytes_and_other_text_is_not_compared(tmp_path, capsys):
    counts = {"num_documents": 3, "num_tokens": 1000, "num_bytes": 4000}
    tokens = {"mode__model__vocab_size": 600}
    write_run(tmp_path / "a", lambda _: 4.0, corpus=counts)
    write_run(tmp_path / "b", lambda _: 2.5, corpus=counts | {"num_tokens": 2000}, **tokens)
    found = figures(capsys, tmp_path / "a", tmp_path / "b")
    assert found["unit"] == "bits per byte" and "different tokenizers or vocabularies" in found["warnings"][0]
    assert [run["final"] for run in found["runs"]] == pytest.approx([4 / math.log(2) / 4, 2.5 / math.log(2) / 2])
    assert found["verdicts"][0]["percent"] == pytest.approx(25), "more bits, although fewer nats per token"
    assert compare.main([str(tmp_path), "--assert_better", "b", "a", "--json"]) == 1
    assert "warning: the runs have different tokenizers" in capsys.readouterr().err, "loud beside JSON, too"
    assert "name two variants" in fails(capsys, tmp_path, "--assert_better", "a", "a")

    write_run(tmp_path / "c", lambda _: 2.5, **tokens)
    assert "NOT COMPARABLE" in figures(capsys, tmp_path / "a", tmp_path / "c")["verdicts"][0]["text"]
    assert "bytes per token are known from checkpoints only" in fails(
        capsys, tmp_path / "a", "--assert_better", "a", tmp_path / "c"
    )

    write_run(tmp_path / "d", lambda _: 2.5, corpus=counts | {"num_bytes": 5000}, mode__seed=1)
    found = figures(capsys, tmp_path / "a", tmp_path / "d")
    assert "different text (validation bytes: 4000 and 5000)" in found["warnings"][0]
    three = figures(capsys, *(tmp_path / name for name in "abd"), "--baseline", "b")
    assert "NOT COMPARABLE" in three["verdicts"][0]["text"], "a and d are seeds of one variant, on different text"
    write_run(tmp_path / "e", lambda _: 2.5, mode__train__eval_sequences=9)
    found = figures(capsys, tmp_path / "a", tmp_path / "e")
    assert "mode.train.eval_sequences: 5 and 9" in found["warnings"][0]
    assert "NOT COMPARABLE" not in found["verdicts"][0]["text"]


def test_assert_better_knows_its_margin(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 3.96)  # 1 % below
    write_run(tmp_path / "b", lambda _: 4.0, mode__experts__num_shared=1)

    def code(*arguments: str) -> int:
        return compare.main([str(tmp_path), "--assert_better", *arguments])

    assert code("a", "b", "--by", "0.0099") == 0
    capsys.readouterr()
    assert code("a", "b") == 1, "one seed has no spread, so a margin must be named"
    assert "name a margin by --by, or train more seeds" in capsys.readouterr().err
    assert code("a", "b", "--by", "0.0101") == 1
    assert "a is 1.000% below b" in capsys.readouterr().err
    assert code("b", "a") == 1 and code("b", "b") == 2  # a variant is not better than itself
    write_run(tmp_path / "copy", lambda _: 3.96, mode__experts__num_shared=2)
    assert code("copy", "a") == 1, "equal is not better"
    folders = [str(tmp_path / name) for name in "ab"]
    assert compare.main(["--assert_better", *folders, "--by", "0.005"]) == 0, "run directories will do"
    assert "neither a run directory nor one of the variants: a, b" in fails(
        capsys, tmp_path, "--assert_better", "a", "c"
    )


def test_assert_better_takes_a_variant_before_a_folder_of_its_name(tmp_path, capsys, monkeypatch):
    """As in the root of this repository, where `mode` is a folder and a variant of the README."""
    write_run(tmp_path / "runs" / "mode", lambda _: 3.9)
    write_run(tmp_path / "runs" / "moe", lambda _: 4.0, mode__experts__num_shared=1)
    (tmp_path / "mode").mkdir()
    (tmp_path / "mode" / "config.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert compare.main(["runs", "--assert_better", "mode", "moe", "--by", "0.02"]) == 0


def test_assert_better_is_not_held_against_half_a_run(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 3.9, flops=4 * 10**8)  # through at 4e10 FLOPs, where b is through 40 %
    write_run(tmp_path / "b", lambda _: 4.0, mode__experts__num_shared=1)
    assert "b is only through 40% of its steps where it is compared" in fails(
        capsys, tmp_path, "--assert_better", "a", "b"
    )
    assert compare.main([str(tmp_path), "--assert_better", "b", "a"]) == 1, "who is not through may still claim"


@pytest.mark.parametrize(
    ("shifts", "steps", "by", "word", "code"),
    [
        pytest.param([0.0], 100, None, None, 1, id="one seed"),
        pytest.param([0.0], 100, "0.01", "better", 0, id="one seed and a margin"),
        pytest.param([0.0], 56, "0.01", None, 2, id="one seed and a baseline in the middle of its schedule"),
        pytest.param([0.0, 0.01], 56, None, None, 2, id="a baseline in the middle of its schedule"),
        pytest.param([0.0, 0.2], 100, None, None, 1, id="within the spread"),
        pytest.param([0.0, 0.01], 100, None, "better", 0, id="outside the spread"),
        pytest.param([0.0, 0.01], 100, "0.05", "better", 1, id="outside the spread by less than asked for"),
    ],
)
def test_the_verdict_and_assert_better_follow_one_rule(tmp_path, capsys, shifts, steps, by, word, code):
    """`a` is 3 % below `b`, and at the end of its schedule where `b` is at the step given."""
    for seed, shift in enumerate(shifts):
        write_run(tmp_path / f"a-s{seed}", lambda _, shift=shift: 3.88 + shift, flops=steps * 10**7, mode__seed=seed)
        write_run(tmp_path / f"b-s{seed}", lambda _, shift=shift: 4.0 + shift, mode__seed=seed, mode__experts__width=16)
    margin = [] if by is None else ["--by", by]
    arguments = [tmp_path, "--baseline", "b", "--assert_better", "a", "b", *margin]
    if code == 2:
        assert f"b is only through {steps}% of its steps where it is compared" in fails(capsys, *arguments)
        arguments = arguments[:3]
    (verdict,) = figures(capsys, *arguments, code=0 if code == 2 else code)["verdicts"]
    assert verdict["verdict"] == word and verdict["percent"] == pytest.approx(-3, abs=0.1)
    assert ("no verdict: " in verdict["text"]) == (word is None) and ("better" in verdict["text"]) == (word == "better")


def test_who_is_not_comparable_gets_no_verdict(tmp_path, capsys):
    counts = {"num_documents": 3, "num_tokens": 1000, "num_bytes": 4000}
    depth = {"capacity_fraction": 0.25, "predictor": {"width": 8}}
    for seed in range(2):
        shift = seed / 100
        write_run(tmp_path / f"a-s{seed}", lambda _, shift=shift: 4.0 + shift, mode__seed=seed, corpus=counts)
        write_run(tmp_path / f"b-s{seed}", lambda _, shift=shift: 3.0 + shift, mode__seed=seed,
                  mode__experts__width=16, corpus=counts | {"num_bytes": 5000})  # fmt: skip
        write_run(tmp_path / f"c-s{seed}", lambda _, shift=shift: 3.0 + shift, mode__seed=seed, mode__depth=depth,
                  corpus=counts)  # fmt: skip
        write_run(tmp_path / f"d-s{seed}", lambda flops, shift=shift: 3.0 + shift if flops < 9e10 else math.nan,
                  mode__seed=seed, mode__experts__width=24, corpus=counts)  # fmt: skip
    words = ["NOT COMPARABLE", "counts by its top-k loss", "is not finite from step"]
    for verdict, word in zip(figures(capsys, tmp_path)["verdicts"], words, strict=True):
        assert verdict["verdict"] is None and verdict["outside_spread"] and word in verdict["text"]
        assert "no verdict: " in verdict["text"] and "better" not in verdict["text"]


def test_assert_better_makes_the_remarks_of_the_verdict(tmp_path, capsys):
    for name, shifts in {"a": [0.0, 0.1], "b": [0.02, 0.09]}.items():
        for seed, shift in enumerate(shifts):
            changes = {"mode__seed": seed, "mode__experts__num_shared": int(name == "b")}
            write_run(tmp_path / f"{name}-s{seed}", lambda _, shift=shift: 4 + shift, steps=40, **changes)
    found = figures(capsys, tmp_path, "--assert_better", "b", "a", code=1)
    remarks = found["verdicts"][0]["remarks"]
    assert remarks[0].startswith("within the seeds' spread (2 and 2 seeds; ")
    assert remarks[1:] == [f"{name} is only through 40% of its steps there" for name in ("b", "a")]
    assert found["assertions"][0]["text"].endswith("; ".join(["asked for: below", *remarks]))
    compare.main([str(tmp_path), "--assert_better", "b", "a"])
    assert "assert_better failed: " in (error := capsys.readouterr().err) and remarks[0] in error


def test_assert_equal_sees_the_last_bit(tmp_path, capsys):
    law = power_law(2.0, 3.0, 0.5)
    write_run(tmp_path / "a", law)
    write_run(tmp_path / "b", law, seconds=0.7)
    pair = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.main([*pair, "--assert_equal"]) == 0
    rows = launch.metrics(tmp_path / "b")
    row = next(row for row in rows if row["step"] == 50)
    row["loss/val"] = math.nextafter(row["loss/val"], 9)
    write_rows(tmp_path / "b", rows)
    capsys.readouterr()
    assert compare.main([*pair, "--assert_equal"]) == 1
    error = capsys.readouterr().err
    assert "differ in loss/val at 1 of 10 steps, first at step 50" in error and "loss/train" not in error
    assert compare.main([*pair, "--assert_equal", "--tolerance", "1e-12"]) == 0
    write_rows(tmp_path / "b", rows[:-1])
    assert compare.main([*pair, "--assert_equal", "--tolerance", "1"]) == 1, "a run that ends earlier is not equal"
    assert "only one has it at step 100" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["RUN", "--points", "0"],
        ["RUN", "--tolerance", "0.1"],
        ["RUN", "--by", "0.1"],
        ["RUN", "--assert_better", "a", "b", "--by", "1.5"],
        ["RUN", "--json", "--markdown"],
        ["RUN", "--plot", "curves.txt"],
        ["RUN", "--at", "epochs"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_assert_equal_of_one_run_and_a_run_that_does_not_exist_are_errors(tmp_path, capsys):
    write_run(tmp_path / "a", lambda _: 4.0)
    assert "needs at least two runs" in fails(capsys, tmp_path / "a", tmp_path / "a", "--assert_equal")
    assert "does not exist" in fails(capsys, tmp_path / "a", tmp_path / "z")


def test_the_report_is_a_table_in_the_terminal_and_markdown_in_a_file(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", lambda _: 4.0)
    write_run(tmp_path / "runs" / "b", lambda _: 3.0, mode__experts__num_shared=1)
    assert compare.main([str(tmp_path / "runs"), "--write", str(tmp_path / "report.md")]) == 0
    printed, written = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert "b against a at equal training FLOPs" in printed and "| b | 3.0000 | 3.0000 |" in written
    assert "mode.experts.num_shared: a = 0; b = 1" in printed and "- mode.experts.num_shared" in written
    tables = [block.splitlines() for block in written.split("\n\n") if block.startswith("|")]
    assert len(tables) == 7 and all(len({line.count("|") for line in table}) == 1 for table in tables)
    compare.main([str(tmp_path / "runs"), "--markdown"])
    assert capsys.readouterr().out == written


def test_the_plot_is_a_picture_and_without_matplotlib_a_message(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "a", power_law(2.0, 3.0, 0.5))
    picture = tmp_path / "curves.png"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert "pip install -e '.[plots]'" in fails(capsys, tmp_path / "a", "--plot", picture)
    image = pytest.importorskip("matplotlib.image")
    assert compare.main([str(tmp_path / "a"), "--plot", str(picture)]) == 0
    pixels = image.imread(picture)
    blue = (abs(pixels[..., :3] - [0.0, 0x72 / 255, 0xB2 / 255]) < 0.01).all(axis=-1)
    assert pixels.shape[:2] == (750, 1800) and blue[:, :900].sum() > 500 and blue[:, 900:].sum() > 500


def test_a_picture_grows_with_its_legend(tmp_path, recwarn):
    image = pytest.importorskip("matplotlib.image")
    for width in range(8, 8 + 24):
        write_run(tmp_path / "runs" / f"a variant with a long name {width}", lambda _: 4.0, mode__experts__width=width)
    assert compare.main([str(tmp_path / "runs"), "--plot", str(tmp_path / "curves.png")]) == 0
    assert not [str(warning.message) for warning in recwarn if "layout" in str(warning.message)]
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels.shape[:2] == (750 + 6 * 36, 1800)  # 24 names in 3 columns, six lines more than fit anyway
    ink = (pixels[..., :3].min(axis=-1) < 0.9).any(axis=1)
    assert not ink[:5].any() and not ink[-5:].any()  # nothing is cut off


def test_help_is_quick_and_has_examples():
    command = [sys.executable, "-X", "importtime", str(launch.ROOT / "tools" / "compare.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--assert_better mode moe --by 0.01" in done.stdout and "Exit codes" in done.stdout
    assert "numpy" not in done.stderr and "torch" not in done.stderr
