"""tools/parity.py and tools/benchmark.py dispatch as a user runs them, at a small size: real ranks, real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import HAS_COMPILER
from tools.benchmarks.turns import Contender, take_turns

ROOT = Path(__file__).parent.parent


def run(*arguments: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=400)


def figures(*arguments: str, threads: int = 1) -> tuple[int, dict[str, Any]]:
    done = run(*arguments, "--json", threads=threads)
    assert done.stdout.startswith("{"), (done.stdout[:300], done.stderr[-3000:])
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_the_layout_does_not_change_the_result(precision: str) -> None:
    """12 layouts on 4 ranks, in which every EP size meets every ZeRO stage, against one process."""
    code, found = figures("tools/parity.py", "--quick", "--steps", "5", "--precision", precision)
    assert {(case["ep_size"], case["zero_stage"]) for case in found["cases"]} == {
        (ep_size, stage) for ep_size in (1, 2, 4) for stage in (0, 1, 2, 3)
    }
    for case in found["cases"]:
        for name, limit in found["wanted"].items():
            assert case[name] <= limit, case
        assert case["same_dtypes"], case
    assert found["dtypes"] == (["float32"] if precision == "fp32" else ["bfloat16", "float32"])
    assert code == 0
    if precision == "fp32":
        assert found["wanted"] == {"loss": 1e-6, "grad_norm": 1e-5, "weights": 1e-5}


def test_bytes_sent_equal_the_accounting_and_are_less_than_deepspeeds_own() -> None:
    code, found = figures(
        *("tools/benchmark.py", "dispatch", "--ranks", "2", "--tokens", "96", "--width", "16", "--hidden", "16"),
        *("--top_k", "2", "--repeats", "2"),
    )
    rows = found["dispatch"]
    assert code == 0 and [row["no_op_share"] for row in rows] == pytest.approx([0.0, 0.25, 0.5, 0.75], abs=0.01)
    for row in rows:
        real = 2 * 96 * 2 * (1 - row["no_op_share"])  # ranks x tokens x choices
        assert row["bytes"] == row["accounting"] == pytest.approx(4 * real * 16 * 4)  # all-to-alls x width x float32
        assert row["bytes"] < row["native_bytes"]
        assert row["flops"] == pytest.approx(real * (3 * 2 * 16 * 16) * 3)
    assert found["gemm_peak"] > 0


DISPATCH = ("dispatch", "--ranks", "1", "--shares", "0")
SMALL = ("--width", "16", "--hidden", "16", "--experts", "4", "--repeats", "2")


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_layer_benchmark_measures_all_that_is_here_and_names_what_is_not(dtype: str, size: int) -> None:
    code, found = figures("tools/benchmark.py", "layer", "--tokens", "64", "--dtype", dtype, *SMALL, threads=2)
    assert code == 0 and found["gemm_peak"] > 0 and found["dtype"] == dtype
    compiled = HAS_COMPILER and dtype == "fp32"
    for top_k in (1, 2):
        rows = {row["contender"]: row for row in found["layer"] if row["top_k"] == top_k}
        ours = {"mode, grouped_mm", "mode, loop", *(["mode, native"] if compiled else [])}
        theirs = {"deepspeed.moe.layer.MoE", "deepspeed AutoEP experts", "dense SwiGLU"}
        assert ours | theirs <= set(rows)
        assert "transformers Mixtral" in set(rows) | set(found["absent"])
        # three matrices, a multiply and an add each, forward once and backward twice
        assert rows["mode, loop"]["flops"] == 64 * top_k * (3 * 2 * 16 * 16) * 3
        assert rows["mode, no-op share 0.5"]["flops"] == rows["mode, loop"]["flops"] / 2
        in_and_out = 4 * 64 * 16 * size  # inputs, outputs and their gradients x tokens x width
        weights = 3 * (3 * 16 * 16) * size  # of one expert, read twice and their gradients written
        assert rows["mode, loop"]["least_bytes"] == in_and_out + 4 * weights
        assert rows["dense SwiGLU"]["least_bytes"] == in_and_out + top_k * weights
        auto = "mode, native" if compiled else "mode, grouped_mm"
        assert rows[auto]["times_ours"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_one_token_has_the_flops_of_all_its_choices_or_none_whatever_share_was_asked_for() -> None:
    code, found = figures("tools/benchmark.py", "layer", "--tokens", "1", "--choices", "1", *SMALL)
    flops = {row["contender"]: row["flops"] for row in found["layer"]}
    assert code == 0 and flops["mode, no-op share 0.5"] in (0, flops["dense SwiGLU"]) and flops["dense SwiGLU"] > 0


def test_the_step_benchmark_counts_the_flops_of_the_routes_taken() -> None:
    code, found = figures(
        "tools/benchmark.py", "step", "--tokens", "256", "--sequence_length", "64", "--layers", "4", *SMALL
    )
    rows = {row["model"]: row for row in found["step"]}
    assert code == 0 and list(rows) == ["moe", "mode_staged", "mode_integrated", "mode"]
    assert rows["moe"]["flops"] > rows["mode_integrated"]["flops"] > rows["mode"]["flops"]
    for row in rows.values():
        assert row["times_fewer_flops"] == pytest.approx(rows["moe"]["flops"] / row["flops"])
        assert row["state_bytes"] >= 16 * 4 * 4 * (3 * 16 * 16)  # experts of 4 layers: weights, gradients, two moments
    assert found["gemm_peak"] > 0
    assert [row["block"] for row in found["blocks"]][:2] == ["full block", "depth-routed, 12.5%"]


def test_the_memory_benchmark_has_a_process_for_every_model() -> None:
    code, found = figures(
        "tools/benchmark.py", "memory", "--tokens", "128", "--sequence_length", "64", "--layers", "2", *SMALL
    )
    assert code == 0 and len(found["memory"]) == 5 and found["options"]["repeats"] == 2
    assert all(row["lowest"] <= row["peak_bytes"] <= row["highest"] for row in found["memory"])


def test_the_profile_names_every_kind_of_work(tmp_path: Path) -> None:
    plot = tmp_path / "step.png"
    code, found = figures(
        *("tools/benchmark.py", "profile", "--tokens", "128", "--sequence_length", "64", "--layers", "2", *SMALL),
        *("--plot", str(plot)),
    )
    assert code == 0 and [row["model"] for row in found["profile"]] == ["moe", "mode_staged", "mode_integrated", "mode"]
    for row in found["profile"]:
        assert all(row["seconds"][kind] > 0 for kind in ("matrix products", "attention", "optimizer", "elementwise"))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_decode_benchmark_counts_flops_and_cache() -> None:
    code, found = figures(
        *("tools/benchmark.py", "decode", "--layers", "4", "--batches", "1", "3", "--contexts", "256", *SMALL),
        *("--steps", "2", "--vocabulary", "64"),
    )
    rows = {(row["batch"], row["model"]): row for row in found["decode"]}
    assert code == 0 and len(rows) == 2 * 6
    for (batch, model), row in rows.items():
        share = row["times_moe"]["median"] / row["times_fewer_flops"]
        assert row["tokens_per_second"] > 0 and row["kept_of_the_saving"] == pytest.approx(share)
        if model in ("dense", "moe", "mode_integrated"):
            per_slot = 2 * batch * 2 * 4 * 4 * 4  # keys and values x rows x heads x head width x float32 x layers
            assert row["cache_bytes"] % per_slot == 0 and row["cache_bytes"] >= 256 * per_slot
        else:
            assert row["cache_bytes"] < rows[batch, "moe"]["cache_bytes"]
    assert rows[1, "moe"]["flops_per_token"] > rows[1, "mode_staged"]["flops_per_token"] > 0 < found["gemm_peak"]
    assert rows[1, "moe"]["times_fewer_flops"] == 1 and rows[1, "mode_staged"]["times_fewer_flops"] > 1


def test_growth_is_measured_for_tokens_experts_and_no_ops() -> None:
    code, found = figures("tools/benchmark.py", "layer", "--grow", "--width", "8", "--hidden", "8", "--repeats", "2")
    grown = [(each["what"], each["tokens"], [row["value"] for row in each["rows"]]) for each in found["growth"]]
    assert code == 0 and grown == [
        ("tokens", None, ["2048", "4096", "8192", "16384", "32768"]),
        ("experts", 4096, ["8", "16", "32", "64"]),
        ("experts", 32768, ["8", "16", "32", "64"]),
        ("no-op share", 4096, ["0", "0.25", "0.5", "0.75"]),
    ]
    assert all(each["rows"][0]["times_the_first"]["median"] == 1 for each in found["growth"])
    tokens, experts, _, shares = (each["rows"] for each in found["growth"])
    assert tokens[4]["flops"] == 16 * tokens[0]["flops"] and shares[2]["flops"] == shares[0]["flops"] / 2
    more = experts[3]["least_bytes"] - experts[0]["least_bytes"]
    assert experts[3]["flops"] == experts[0]["flops"] and more == 56 * 4 * 3 * (3 * 8 * 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("layer --experts 1", "--experts: is 1, fewer than the 2 choices of a token"),
        ("layer --tokens 0", "argument --tokens: is '0'; it must be a whole number of at least 1"),
        ("layer --share 1.5", "argument --share: is '1.5'; it must be a number from 0 to below 1"),
        ("layer --top_k 2", "--top_k: is for --grow"),
        ("layer --grow --choices 2", "--choices: is not for --grow; with it name --top_k"),
        ("layer --grow --share 0", "--share: is not for --grow"),
        ("layer --repeats 1", "argument --repeats: is '1'; it must be a whole number of at least 2"),
        ("layer --width 9 --tokens 8 --repeats 2", "could not be measured at these sizes"),
        ("step --tokens 300 --sequence_length 256", "--tokens: is 300, not a multiple of --sequence_length 256"),
        ("memory --tokens 300 --sequence_length 256", "--tokens: is 300, not a multiple of --sequence_length 256"),
        ("step --layers 1", "depth.every"),
        ("step --write nowhere/at/all.md", "--write: is nowhere/at/all.md, which is a folder or in none"),
        ("profile --plot nowhere/at/all.png", "--plot: is nowhere/at/all.png, which is a folder or in none"),
        ("profile --plot picture.foo", "--plot: is picture.foo; name a file that ends in .png"),
        ("layer --write /proc/table.md", "--write: is /proc/table.md, which cannot be written; name another file"),
        ("dispatch --ranks 3 --experts 4", "--ranks: has 3, which does not divide --experts 4"),
        ("dispatch --shares 1", "argument --shares: is '1'; it must be a number from 0 to below 1"),
        ("decode --batches 0", "argument --batches: is '0'; it must be a whole number of at least 1"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line_before_anything_is_measured(arguments: str, words: str) -> None:
    done = run("tools/benchmark.py", *arguments.split())
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr


def test_a_contender_that_fails_later_is_left_out_with_its_reason_and_the_others_go_on() -> None:
    turns = iter(range(10))

    def fails_at_the_third() -> None:
        if next(turns) == 2:
            raise MemoryError("no more\nof it")

    sound, weak = Contender("sound", lambda: None), Contender("weak", fails_at_the_third)
    failed: dict[str, str] = {}
    seconds = take_turns([weak, sound], 5, quiet=True, failed=failed)
    assert {name: len(each) for name, each in seconds.items()} == {"sound": 5}
    assert failed == {"weak": "MemoryError: no more of it"}
    with pytest.raises(ZeroDivisionError):  # of our own, it ends everything
        take_turns([Contender("ours", lambda: 1 / 0)], 2, quiet=True)


def test_where_deepspeeds_layer_cannot_take_the_tokens_ours_is_measured_alone() -> None:
    done = run("tools/benchmark.py", *DISPATCH, "--tokens", "1", *SMALL)
    row, *absent = [line for line in done.stdout.splitlines() if line.startswith(("| 1 |", "Not measured"))]
    assert done.returncode == 0 and row.endswith("| - | - | - |")
    assert len(absent) == 2 and all("deepspeed" in line and "min_capacity" in line for line in absent)


def test_an_interrupt_is_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "tools/benchmark.py", *DISPATCH, *SMALL[:-1], "1000000"],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True},
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("1 ranks"):  # from there on it measures
        assert process.poll() is None
    process.stderr.readline()  # the rank's first
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, problem = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert "interrupted before all turns were over" in problem and "Traceback" not in problem


def test_every_other_turn_goes_through_the_contenders_backwards() -> None:
    order: list[str] = []
    take_turns([Contender(name, partial(order.append, name)) for name in "abc"], 2, quiet=True)
    assert "".join(order) == "abc" + "cba" + "abc"
