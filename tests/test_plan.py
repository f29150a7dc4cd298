"""tools/plan.py as a user runs it: the figures, the table, the warnings, and every way to get it wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "ds_configs").rglob("*.json"))


def run_plan(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("environment", {})
    command = [sys.executable, "tools/plan.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=60, **options)


def plan_json(*arguments: str | Path) -> dict[str, Any]:
    done = run_plan(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def write(folder: Path, change: dict[str, Any], base: str = "ds_configs/mode.json") -> Path:
    """A copy of a shipped file with some values changed, named by dotted paths."""
    document = json.loads((ROOT / base).read_text())
    for path, value in change.items():
        part = document
        *parents, last = path.split(".")
        for key in parents:
            part = part[key]
        part[last] = value
    file = folder / "changed.json"
    file.write_text(json.dumps(document))
    return file


def known(folder: Path, base: str = "ds_configs/mode.json") -> Path:
    """A shipped file with the size, batch and length that the figures below are worked out for."""
    sizes = {"vocab_size": 4096, "num_layers": 8, "width": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_width": 352}
    change: dict[str, Any] = {f"mode.model.{name}": value for name, value in sizes.items()}
    change |= {"train_batch_size": 16, "mode.train": {"steps": 300}, "mode.model.tied_head": True}
    change |= {"mode.experts.width": 352}
    if base == "ds_configs/mode.json":
        change |= {"mode.experts.num_no_ops": 1, "mode.experts.no_op_fraction": 0.5}
        change |= {"mode.depth.predictor": {"width": 64}, "mode.depth.warmup_fraction": 0.0}
    return write(folder, change, base)


def row(text: str, label: str) -> list[str]:
    """The cells of the first line of a table that starts with `label`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label + "  "))
    return line.strip().removeprefix(label).split()


# ---------------------------------------------------------------------------------------------------
# Figures, worked out here from the sizes of `known`


def test_the_figures_of_the_flagship_are_right(tmp_path: Path) -> None:
    plan = plan_json(known(tmp_path))["plan"]
    assert plan["layout"]["tokens_per_step"] == 16 * 256

    plain, routed = plan["blocks"][0], plan["blocks"][1]
    assert [block["routed"] for block in plan["blocks"]] == [False, True] * 4
    assert (plain["kept"], plain["skipped"]) == (4096, 0)
    assert (plain["processed"], plain["no_op"], plain["dropped"]) == (2048, 2048, 0)
    assert routed["kept_per_sequence"] == 32
    assert (routed["kept"], routed["skipped"]) == (512, 3584)
    assert (routed["processed"], routed["no_op"], routed["dropped"]) == (256, 256, 0)

    attention = 128 * 128 + 2 * 64 * 128 + 128 * 128
    expert, router, norms, bias = 3 * 128 * 352, 9 * 128, 2 * 128, 128 + 64 + 64
    depth_router, predictor = 128, 128 * 64 + 64 + 64 + 1
    block = attention + bias + 8 * expert + router + norms
    assert plan["parameters"]["total"] == 4096 * 128 + 128 + 8 * block + 4 * (depth_router + predictor)
    outside = 4096 * 128 + 128
    in_plain = attention + bias + router + norms + expert // 2
    in_routed = depth_router + predictor + in_plain // 8
    assert plan["parameters"]["active_per_token"] == outside + 4 * in_plain + 4 * in_routed

    def matrices(tokens: int) -> int:
        return 2 * tokens * (attention + router) + 2 * (tokens // 2) * expert

    def scores(slots: int) -> int:
        return 4 * 16 * 4 * slots * slots * 32

    head = 2 * 4096 * 128 * 4096
    linear = 4 * matrices(4096) + 4 * matrices(512) + 4 * 2 * 4096 * depth_router + head
    square = 4 * scores(256) + 4 * scores(32)
    first, second = 4 * 2 * 4096 * 128 * 64, 4 * 2 * 4096 * 64
    assert plan["flops"]["forward_per_micro_batch"] == linear + square + first + second
    assert plan["flops"]["backward_per_micro_batch"] == 2 * linear + square * 5 // 2 + first + 2 * second
    training = 3 * linear + square * 7 // 2 + 2 * first + 3 * second
    assert plan["flops"]["training_per_step"] == training
    assert plan["flops"]["training_per_token"] == round(training / 4096)
    assert plan["run"] == {"steps": 300, "warmup_steps": 0, "tokens": 300 * 4096, "training_flops": 300 * training}


def test_ranks_and_expert_parallelism_divide_the_work(tmp_path: Path) -> None:
    file = known(tmp_path)
    one = plan_json(file)["plan"]
    four = plan_json(file, "--world_size", "4", "--ep_size", "2")["plan"]
    assert four["layout"]["rows_per_micro_batch"] == 4
    assert four["flops"]["training_per_step"] == one["flops"]["training_per_step"]
    assert four["parameters"] == one["parameters"]

    sent = 4 * (512 + 64) * 128 * 4  # bytes of one all-to-all in every block: 4 plain and 4 routed ones, fp32
    assert one["communication"]["bytes_per_rank_and_step"] == 0
    assert four["communication"]["all_to_alls_per_step"] == 4 * 8
    assert four["communication"]["bytes_per_rank_and_step"] == 4 * sent
    assert four["communication"]["bytes_leaving_per_rank_and_step"] == 2 * sent

    total, experts = four["parameters"]["total"], four["parameters"]["by_group"]["experts"]
    local = total - experts + experts // 2
    part = -(-(total - experts) // 4) + experts // 2 // 2
    memory = four["memory"]
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (4 * local, 4 * local, 12 * part)
    assert memory["total"] == memory["total_by_zero_stage"][1]


def test_the_reduced_capacity_control_drops_a_quarter(tmp_path: Path) -> None:
    plan = plan_json(known(tmp_path, "ds_configs/moe_reduced_capacity.json"))["plan"]
    assert [block["expert_capacity"] for block in plan["blocks"]] == [384] * 8
    assert plan["routing"] == {
        "kept": 8 * 4096,
        "skipped": 0,
        "assignments": 8 * 4096,
        "processed": 8 * 3072,
        "no_op": 0,
        "dropped": 8 * 1024,
    }


def test_a_run_given_in_tokens_or_flops_is_turned_into_steps(tmp_path: Path) -> None:
    tokens = write(tmp_path, {"train_batch_size": 16, "mode.train": {"tokens": 4096 * 10 + 1}})
    assert plan_json(tokens)["plan"]["run"]["steps"] == 10
    flops = write(tmp_path, {"mode.train": {"flops": 2.5e13}})
    plan = plan_json(flops)["plan"]
    assert abs(plan["run"]["training_flops"] - 2.5e13) <= plan["flops"]["training_per_step"] / 2


@pytest.mark.parametrize("config", CONFIGS)
def test_every_shipped_config_is_accepted_without_a_warning(config: str) -> None:
    done = run_plan(config, "--memory_gb", "80")
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning" not in done.stdout


def test_a_warmup_is_shown_and_counted(tmp_path: Path) -> None:
    """Routed blocks keep nearly all tokens at first: more FLOPs than the steps after it have, and more memory."""
    without, with_it = (
        plan_json(write(tmp_path, {"mode.train": {"steps": 100}, "mode.depth.warmup_fraction": share}))["plan"]
        for share in (0, 0.2)
    )
    assert [plan["run"]["warmup_steps"] for plan in (without, with_it)] == [0, 20]
    assert without["run"]["training_flops"] == 100 * without["flops"]["training_per_step"]
    assert with_it["run"]["training_flops"] > without["run"]["training_flops"]
    assert with_it["memory"]["activations"] > 1.5 * without["memory"]["activations"]
    assert with_it["memory"]["activations"] == with_it["memory"]["activations_without_checkpointing"]


def test_the_number_of_ranks_follows_from_the_batch_sizes() -> None:
    assert plan_json("ds_configs/scale/mode_7b.json")["plan"]["layout"]["world_size"] == 64


# ---------------------------------------------------------------------------------------------------
# The table


def test_the_table_shows_two_configs_side_by_side_with_a_ratio() -> None:
    done = run_plan("ds_configs/mode.json", "--compare", "ds_configs/moe.json")
    assert done.returncode == 0
    both = plan_json("ds_configs/mode.json", "--compare", "ds_configs/moe.json")
    first, second = (both[key]["flops"]["training_per_step"] for key in ("plan", "compare"))
    assert row(done.stdout, "training, per step on all ranks") == [
        f"{first / 1e9:.3g}",
        "GFLOPs",
        f"{second / 1e9:.3g}",
        "GFLOPs",
        f"{first / second:.3f}",
    ]
    assert row(done.stdout, "assignments no-op") == [f"{both['plan']['blocks'][0]['no_op']:,}", "0"]
    assert row(done.stdout, "depth router") == [str(both["plan"]["parameters"]["by_group"]["depth_router"]), "-"]
    assert max(len(line) for line in done.stdout.splitlines()) <= 120


def test_two_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    copy = tmp_path / "mode.json"
    copy.write_text((ROOT / "ds_configs/mode.json").read_text())
    header = run_plan("ds_configs/mode.json", "--compare", copy).stdout.split("\n\n")[1]
    assert header.split() == ["ds_configs/mode.json", str(copy), "ratio"]


def test_a_description_beyond_ascii_does_not_break_a_plain_terminal(tmp_path: Path) -> None:
    file = write(tmp_path, {"mode.description": "na\u00efve \u2192 MoDE"})
    done = run_plan(file, environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "na\\xefve \\u2192 MoDE" in done.stdout


# ---------------------------------------------------------------------------------------------------
# Warnings


@pytest.mark.parametrize(
    ("change", "arguments", "warning"),
    [
        (
            {"train_batch_size": 1, "mode.experts.no_op_fraction": 0.5},
            [],
            "an expert of a routed block will see about 2 assignments per step",
        ),
        ({"mode.depth.capacity_fraction": 0.00390625}, [], "a routed block keeps one token per sequence"),
        ({}, ["--memory_gb", "0.01"], "beyond the 0.01 GB of --memory_gb"),
        ({"mode.experts": None}, ["--ep_size", "2"], "--ep_size has no effect"),
        ({"zero_optimization.offload_optimizer": {"device": "cpu"}}, [], "as if nothing were offloaded"),
        ({"optimizer.type": "Lion"}, [], 'optimizer.type is "Lion"; memory is counted as for Adam'),
        ({"mode.train": {"tokens": 600}}, [], "mode.train.tokens is 600; a step takes 2048, so the run has 1 of them"),
        ({"mode.train": {"flops": 1e9}}, [], "mode.train.flops is 1e+09; a step takes"),
        ({"mode.experts.balance_bias": None}, [], "held by a balance loss of weight 0.01 alone"),
        (
            {"mode.experts.top_k": 2, "mode.experts.no_op_fraction": 0.5},
            [],
            "no token has a choice about no-ops: a share of 0.5 of 2 distinct choices",
        ),
        (
            {"mode.depth.predictor": None, "mode.depth.aux_loss": None},
            [],
            "neither depth.predictor nor depth.aux_loss is set",
        ),
    ],
    ids=[
        "few tokens",
        "one token",
        "memory",
        "ep_size",
        "offload",
        "optimizer",
        "tokens",
        "flops",
        "weak balance",
        "forced no-ops",
        "no predictor",
    ],
)
def test_a_config_worth_a_second_look_gets_a_warning(
    tmp_path: Path, change: dict[str, Any], arguments: list[str], warning: str
) -> None:
    file = write(tmp_path, change)
    done = run_plan(file, *arguments)
    assert done.returncode == 0
    assert f"warning: {file}: " in done.stdout
    assert warning in done.stdout
    assert any(warning in said for said in plan_json(file, *arguments)["plan"]["warnings"])


def test_a_budget_that_whole_steps_nearly_meet_gets_no_warning(tmp_path: Path) -> None:
    for tokens, missed in (
        (20480, None),
        (22500, None),
        (1.9 * 2048, None),
        (1.8 * 2048, "+11%"),
        (2.4 * 2048, "-17%"),
    ):
        plan = plan_json(write(tmp_path, {"train_batch_size": 8, "mode.train": {"tokens": round(tokens)}}))["plan"]
        assert [text for text in plan["warnings"] if missed in text] if missed else not plan["warnings"], tokens


# ---------------------------------------------------------------------------------------------------
# Errors: one line on stderr, exit code 2, nothing on stdout


def assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["required: config"]),
        (["missing.json"], ["missing.json", "No such file"]),
        (["ds_configs"], ["Is a directory"]),
        (["README.md\n.json"], ["cannot be read"]),
        (["ds_configs/mode.json", "--compare", "missing.json"], ["missing.json"]),
        (["ds_configs/mode.json", "--world_size", "0"], ["--world_size", "at least 1"]),
        (["ds_configs/mode.json", "--world_size", "two"], ["--world_size", "two"]),
        (["ds_configs/mode.json", "--world_size", "9" * 5000], ["--world_size"]),
        (["ds_configs/mode.json", "--memory_gb", "nan"], ["--memory_gb", "above 0"]),
        (["ds_configs/mode.json", "--unknown"], ["--unknown"]),
        (["ds_configs/mode.json", "--world_size", "3"], ["train_batch_size", "3 ranks"]),
        (["ds_configs/mode.json", "--world_size", "32"], ["train_batch_size", "32 ranks"]),
        (["ds_configs/mode.json", "--ep_size", "3"], ["mode.experts.ep_size", "num_experts = 8"]),
        (["ds_configs/mode.json", "--world_size", "2", "--ep_size", "4"], ["mode.experts.ep_size", "2 ranks"]),
        (["ds_configs/scale/mode_1b.json", "--world_size", "12"], ["mode.experts.ep_size", "12 ranks"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(arguments: list[str], words: list[str]) -> None:
    assert_one_line_error(run_plan(*arguments), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode.experts.top_k": 100}, ["mode.experts.top_k", "100"]),
        ({"mode.modell": {}}, ['did you mean "model"?']),
        ({"mode": None}, ["mode"]),
        ({"zero_optimization.reduce_bucket_size": "big"}, ["zero_optimization.reduce_bucket_size"]),
    ],
    ids=str,
)
def test_a_bad_config_is_one_line_and_exit_code_2(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    file = write(tmp_path, change)
    assert_one_line_error(run_plan(file), str(file), *words)


def test_a_file_that_is_not_json_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(b"\xff\xfe{")
    assert_one_line_error(run_plan(file), "UTF-8")
    file.write_text("{")
    assert_one_line_error(run_plan(file), "not valid JSON")


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "tools/plan.py", "ds_configs/mode.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
        )
    assert (done.returncode, done.stderr) == (4, "")


def test_help_names_every_option() -> None:
    done = run_plan("--help")
    assert done.returncode == 0
    for option in ("--world_size", "--ep_size", "--compare", "--memory_gb", "--json"):
        assert option in done.stdout
