"""`train.py` as a user meets it: flags, messages, what a run directory holds, every shipped configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data

from mode import accounting
from mode.config.file import load_config, load_run_config
from tests import launch
from tests.helpers import HAS_COMPILER

CONFIGS = sorted((launch.ROOT / "ds_configs").glob("*.json"))
SCALE = sorted((launch.ROOT / "ds_configs" / "scale").glob("*.json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return launch.write_tiny(folder)


@pytest.fixture(scope="module")
def finished(tiny):
    """A run with everything logged."""
    run_dir = tiny.parent / "runs" / "detailed"
    job = launch.run(
        ["--deepspeed_config", str(tiny), "--output_dir", str(run_dir), "--set", "mode.train.monitor=detailed"],
        tiny.parent / "detailed.log",
    )
    return run_dir, job.output()


def fails(arguments: list[str], log: Path) -> str:
    job = launch.start(arguments, log)
    assert job.wait() == [2], job.output()
    assert "Traceback" not in job.output()
    return job.output()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_runs_three_steps(path, tmp_path):
    settings = [
        "mode.train.flops=null",
        "mode.train.steps=3",
        "train_batch_size=2",
        "mode.data.max_documents=60",
        "mode.train.eval_sequences=2",
    ]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    launch.run(["--deepspeed_config", str(path), "--output_dir", str(tmp_path / "run"), *arguments], tmp_path / "log")
    config, rows = load_config(tmp_path / "run" / "config.json"), launch.metrics(tmp_path / "run")
    assert rows[-1]["step"] == 3 and "loss/val" in rows[-1]
    expected = 3 * accounting.model_flops(config, accounting.expected_counts(config, rows=2)).training
    assert rows[-1]["flops"] == pytest.approx(expected, rel=0.3), "routes differ from the targets at first, not wildly"


@pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
def test_every_cluster_config_runs_three_steps_at_a_small_size(path, tiny, tmp_path):
    """The same precision, ZeRO stage and routing; width, depth, experts and data made small."""
    corpus = json.dumps({"paths": [str(tiny.parent / "corpus" / "*.txt")]})
    settings = [
        *("mode.model.width=32", "mode.model.num_layers=4", "mode.model.num_heads=2", "mode.model.num_kv_heads=1"),
        *("mode.model.ffn_width=32", "mode.model.vocab_size=300", "mode.model.sequence_length=32"),
        *("mode.experts.width=32", "mode.experts.ep_size=1"),
        *("mode.train.steps=3", "mode.train.eval_sequences=2", "mode.data.source=files", "mode.data.hub=null"),
        *(f"mode.data.files={corpus}", "mode.data.tokenizer=bytes", "mode.data.pretrained=null"),
        *("train_batch_size=2", "train_micro_batch_size_per_gpu=null", "gradient_accumulation_steps=null"),
        *("optimizer.params.torch_adam=true", "zero_optimization.reduce_bucket_size=100000"),
        f"mode.data.cache_dir={tiny.parent / 'cache'}",
    ]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    launch.run(["--deepspeed_config", str(path), "--output_dir", str(tmp_path / "run"), *arguments], tmp_path / "log")
    assert launch.metrics(tmp_path / "run")[-1]["step"] == 3


def test_the_run_directory_holds_config_metrics_events_checkpoints_and_tokenizer(finished):
    run_dir, _ = finished
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tokenizer"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    resolved = load_run_config(run_dir / "config.json")
    assert resolved.deepspeed["scheduler"]["params"]["total_num_steps"] == "auto", "a longer run gets a longer schedule"
    for row in launch.metrics(run_dir):
        assert {"step", "tokens", "flops", "loss/train", "perf/tokens_per_second", "optim/lr"} <= row.keys()


def test_routed_blocks_keep_fewer_tokens_with_every_step_of_a_warmup(finished):
    run_dir, _ = finished
    config, rows = load_config(run_dir / "config.json"), launch.metrics(run_dir)
    length, depth = config.model.sequence_length, config.depth
    kept = [
        accounting.depth_capacity(accounting.capacity_fraction_at(depth, step, len(rows)), length) for step in range(12)
    ]
    assert [row["depth/kept_fraction"] * length for row in rows] == kept
    assert kept[0] > 0.85 * length and kept[6] > kept[7] == kept[-1] == length / 4


def test_tensorboard_holds_losses_routing_histograms_image_text_and_hparams(finished):
    run_dir, _ = finished
    board = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "histograms": 0, "images": 0}).Reload()
    tags = board.Tags()
    for tag in (
        *("loss/train", "loss/val", "loss/val_causal", "loss/total", "loss/expert_balance", "loss/expert_z"),
        *("loss/counted", "loss_by_tokens/counted", "loss_by_flops/counted", "loss_by_time/counted"),
        *("loss/depth_predictor", "depth/kept_fraction_causal"),
        *("optim/lr", "optim/grad_norm", "perf/tokens_per_second"),
        *("depth/kept_fraction", "depth/predictor_accuracy", "depth/router_above_half", "depth/kept_fraction/block_1"),
        *("experts/no_op_share", "experts/dropped_share", "experts/max_violation", "experts/dead_experts"),
        *("experts/mean_gate", "experts/mean_gate/block_0"),
        *("experts/load_entropy", "experts/load_entropy/block_0"),
    ):
        assert tag in tags["scalars"], tag
    assert "histogram/depth_logits/block_1" in tags["histograms"]
    assert "histogram/tokens_per_expert/block_0" in tags["histograms"]
    assert tags["images"] == ["routing/decisions"]
    assert any(tag.startswith("sample") for tag in tags["tensors"])
    assert any(tag.startswith("_hparams_") for tag in board.summary_metadata)
    rows = launch.metrics(run_dir)
    by_step = {event.step: event.value for event in board.Scalars("loss/train")}
    assert by_step == {row["step"]: pytest.approx(row["loss/train"], rel=1e-6) for row in rows}
    assert [event.step for event in board.Scalars("loss_by_tokens/train")] == [row["tokens"] for row in rows]
    assert [event.step for event in board.Scalars("loss_by_flops/val")] == [
        row["flops"] // 10**9 for row in rows if "loss/val" in row
    ]


def test_hparams_are_by_the_counted_loss_which_is_the_causal_one_where_depth_routed(finished):
    run_dir, _ = finished
    board = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    experiment = board.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert [info.name.tag for info in parse_experiment_plugin_data(experiment).metric_infos] == ["loss/counted"]
    rows = [row for row in launch.metrics(run_dir) if "loss/counted" in row]
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert all(row["loss/counted"] == row["loss/val_causal"] != row["loss/val"] for row in rows)
    for tag, places in {
        "loss/counted": [row["step"] for row in rows],
        "loss_by_tokens/counted": [row["tokens"] for row in rows],
        "loss_by_flops/counted": [row["flops"] // 10**9 for row in rows],
    }.items():
        events = board.Scalars(tag)
        assert [event.step for event in events] == places
        assert [event.value for event in events] == pytest.approx([row["loss/counted"] for row in rows], rel=1e-6)


def test_the_brief_monitor_has_no_tag_per_block(tiny, tmp_path):
    run_dir = tmp_path / "run"
    launch.run(["--deepspeed_config", str(tiny), "--output_dir", str(run_dir)], tmp_path / "log")
    tags = EventAccumulator(str(run_dir)).Reload().Tags()
    assert not [tag for tag in tags["scalars"] if "block_" in tag] and not tags["histograms"]
    assert len(tags["scalars"]) < 40


def test_the_opening_table_says_how_the_experts_are_computed_and_why(finished):
    _, output = finished
    expected = "native (compiled for this CPU)" if HAS_COMPILER else "grouped_mm (there is no C++ compiler "
    assert f"\n  experts          {expected}" in output


def test_the_closing_lines_tell_losses_compute_a_sample_and_what_to_do_next(finished):
    run_dir, output = finished
    for words in ("train loss", "validation loss", "a bigram model:", "perplexity", "bits per byte", "training FLOPs"):
        assert words in output
    assert f"tensorboard --logdir {run_dir.parent}" in output
    assert f"--output_dir {run_dir} --resume auto" in output
    assert "sample:" in output
    last = launch.metrics(run_dir)[-1]
    assert float(re.search(r"validation loss\s+([\d.]+)", output).group(1)) == pytest.approx(last["loss/val"], abs=1e-4)
    causal = re.search(r"causal loss\s+([\d.]+)  \(routed by the predictor", output)
    assert float(causal.group(1)) == pytest.approx(last["loss/val_causal"], abs=1e-4)
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 12 and all("tok/s" in line and "no-op" in line and "kept" in line for line in lines)
    assert "ETA" not in lines[0] and all(re.search(r"/12  ETA \d\d:\d\d  loss", line) for line in lines[1:])


def test_dry_run_prints_the_resolved_config_and_the_plan_and_writes_nothing(tiny, tmp_path):
    arguments = ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run"), "--dry_run"]
    output = launch.run([*arguments, "--set", "mode.train.steps=77"], tmp_path / "log").output()
    assert '"total_num_steps": 77' in output and "training FLOPs" in output and "ZeRO stage 1" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["mode.train.stepz=3"], 'mode.train.stepz: unknown key; did you mean "steps"?'),
        (["mode.train.steps"], '--set: is "mode.train.steps"; it must look like'),
        (["mode.model.width.x=1"], "mode.model.width is 32, not a JSON object"),
        (["mode.train.steps=null"], "exactly one of steps, tokens and flops"),
        (["train_batch_size=3", "gradient_accumulation_steps=2"], "train_batch_size"),
        (['mode.data.files.paths=["/nowhere/*.txt"]'], "/nowhere/*.txt"),
        (["mode.model.sequence_length=1000000"], "sequence"),
        (["optimizer=null"], "optimizer: is null; it must be a JSON object"),
        (["optimizer={}"], "optimizer: is {}; it must be a DeepSpeed optimizer section"),
        (["optimizer.type=Foo"], 'optimizer.type: is "Foo"; it must be one of adagrad, adam'),
        (
            ['optimizer={"type": "ASGD"}'],
            "deepspeed: DeepSpeed refused its part of the configuration: You are using an untested ZeRO Optimizer",
        ),
        (["mode.model.width=1048576"], "GB in float32, but the machine has"),
        (["steps=20"], 'tiny.json: steps: unknown key, which DeepSpeed would ignore; did you mean "mode.train.steps"?'),
        (["gradient_clipping=abc"], 'gradient_clipping: is "abc"; it must be a number at least 0'),
        (["tensorboard=true"], "tensorboard: is true; it must be a JSON object"),
        (["scheduler=null"], "scheduler: is null; it must be a JSON object"),
        (["tensorboard.job_name=5"], "tensorboard.job_name: is 5"),
        (["mode.experts.ep_size=2"], "mode.experts.ep_size: is 2, which does not divide the 1 ranks"),
        pytest.param(
            *(["wandb.enabled=true"], "wandb.enabled: is true, but the package wandb is not installed: pip install"),
            marks=pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_one_clear_line(tiny, tmp_path, settings, words):
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    output = fails(
        ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run"), *arguments], tmp_path / "log"
    )
    assert words in output
    assert not (tmp_path / "run" / "checkpoints").exists()


def break_the_model() -> None:
    from mode.transformer.model import ModeTransformer

    def broken(model: object, *arguments: object) -> None:
        raise TypeError("a defect of the model")

    ModeTransformer.to = broken


def test_a_defect_met_by_deepspeed_is_no_wrong_setting_and_keeps_its_traceback(tiny, tmp_path):
    arguments = ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run")]
    job = launch.start(arguments, tmp_path / "log", before=break_the_model)
    assert job.wait() == [1]
    assert "Traceback" in job.output() and "in broken" in job.output() and "in initialize" in job.output()
    assert "refused its part of the configuration" not in job.output()


def test_equal_flops_budgets_give_runs_of_equal_flops(tiny, tmp_path):
    budget, totals = 4e8, {}
    for name, change in {"both": [], "dense": ["mode.experts=null", "mode.depth=null"]}.items():
        settings = [f"mode.train.flops={budget}", *change]
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        launch.run(
            ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / name), *arguments],
            tmp_path / f"{name}.log",
        )
        totals[name] = launch.metrics(tmp_path / name)[-1]
    assert totals["dense"]["flops"] == pytest.approx(budget, rel=0.05)  # to half a step
    assert totals["both"]["step"] > totals["dense"]["step"]
    assert totals["dense"]["loss/counted"] == totals["dense"]["loss/val"], "all runs have the tag"
    assert "loss_by_flops/counted" in EventAccumulator(str(tmp_path / "dense")).Reload().Tags()["scalars"]


def test_a_tokens_budget_is_a_number_of_steps(tiny, tmp_path):
    arguments = ["--set", "mode.train.tokens=640"]
    launch.run(["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run"), *arguments], tmp_path / "log")
    assert launch.metrics(tmp_path / "run")[-1]["tokens"] == 640


def test_an_output_directory_that_cannot_be_used_is_one_clear_line(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for number, folder in enumerate([tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing/run")]):
        output = fails(["--deepspeed_config", str(tiny), "--output_dir", str(folder)], tmp_path / f"log{number}")
        assert f"--output_dir: {folder} cannot be written to" in output


def test_a_second_run_in_the_same_directory_is_refused(tiny, tmp_path):
    arguments = ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run")]
    first = launch.start([*arguments, "--set", "mode.train.steps=100000"], tmp_path / "first")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert first.processes[0].is_alive(), first.output()
        time.sleep(0.05)
    assert "is in use by another run" in fails(arguments, tmp_path / "second")
    first.kill()


def test_events_in_a_folder_the_user_named_are_never_deleted(tiny, tmp_path):
    other = tmp_path / "boards" / "run" / "events.out.tfevents.1.other"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another run")
    settings = ["--set", f"tensorboard.output_path={tmp_path / 'boards'}", "--set", "mode.train.steps=2"]
    launch.run(["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run"), *settings], tmp_path / "log")
    assert other.read_bytes() == b"of another run" and len(list(other.parent.iterdir())) == 2


def test_the_csv_monitor_writes_into_the_run_directory(tiny, tmp_path):
    run_dir = tmp_path / "run"
    settings = ["--set", "csv_monitor.enabled=true", "--set", "mode.train.steps=2"]
    launch.run(["--deepspeed_config", str(tiny), "--output_dir", str(run_dir), *settings], tmp_path / "log")
    assert len(list(run_dir.glob("*loss_train.csv"))) == 1


def test_help_explains_every_flag():
    output = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=launch.ROOT, capture_output=True, text=True, check=True
    ).stdout
    for flag in ("--deepspeed_config", "--output_dir", "--resume", "--set", "--extend", "--dry_run"):
        assert flag in output


def test_a_run_loads_no_compiler_it_has_no_use_for(tiny, tmp_path):
    arguments = ["--deepspeed_config", str(tiny), "--output_dir", str(tmp_path / "run"), "--set", "mode.train.steps=1"]
    code = (
        f"import sys, train; code = train.main({arguments}); print(code, 'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=launch.ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr


def typed(command: str, *more: str) -> subprocess.Popen[str]:
    """Starts a command line that begins with `deepspeed`, on a port of its own."""
    launcher, *rest = shlex.split(command)
    port = ["--master_port", str(20000 + os.getpid() % 20000)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [str(Path(sys.executable).with_name(launcher)), *port, *rest, *more]
    return subprocess.Popen(words, cwd=launch.ROOT, start_new_session=True, **streams)


def test_the_deepspeed_launcher_trains_on_two_ranks_and_the_command_of_a_stopped_run_resumes_it(tiny, tmp_path):
    run_dir = tmp_path / "run"
    command = f"deepspeed --num_accelerators 2 train.py --deepspeed_config {tiny} --output_dir {run_dir}"
    long = ["--set", "mode.train.steps=100000", "--set", "mode.train.save_every=100000"]
    process = typed(command, *long)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: the launcher and every rank are told
    output, _ = process.communicate(timeout=60)
    assert "2 ranks" in output and "the state is saved" in output, output
    step = int((run_dir / "checkpoints" / "latest").read_text().removeprefix("step_"))
    resume = re.search(r"^resume: +(deepspeed .*)$", output, re.M)
    process = typed(resume.group(1), "--set", f"mode.train.stop_after={step + 2}")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "2 ranks" in output and f"at step {step}" in output
    assert "FutureWarning" not in output, "DeepSpeed's calls are not for users to mend"
    assert launch.metrics(run_dir)[-1]["step"] == step + 2
