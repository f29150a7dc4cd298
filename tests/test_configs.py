"""Every shipped configuration loads, says what it is for, and says the truth about what it costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mode import accounting
from mode.config.file import RunConfig, load_config, load_run_config
from mode.config.settings import ModeConfig

ROOT = Path(__file__).parent.parent
SMALL = sorted((ROOT / "ds_configs").glob("*.json"))
SCALE = sorted((ROOT / "ds_configs" / "scale").glob("*.json"))
RANKS = {"mode_1b": 8, "mode_7b": 64}

every_small = pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
every_scale = pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
every_config = pytest.mark.parametrize("path", SMALL + SCALE, ids=lambda path: path.stem)


def small(name: str) -> ModeConfig:
    return load_config(ROOT / "ds_configs" / f"{name}.json")


def parameters_and_flops(run: RunConfig, world_size: int) -> tuple[int, int, int]:
    """Parameters, active parameters per token, training FLOPs per step."""
    rows, micro_batches = run.engine.batch_layout(world_size)
    counts = accounting.expected_counts(run.mode, rows)
    active = round(sum(accounting.active_parameters(run.mode, counts).values()))
    training = accounting.model_flops(run.mode, counts).training * micro_batches * world_size
    return accounting.num_parameters(run.mode), active, training


def test_the_promised_configs_are_there() -> None:
    names = {path.stem for path in SMALL}
    assert names >= {"dense", "moe", "mod", "mode_staged", "mode_integrated", "mode"}
    assert names >= {"moe_reduced_capacity", "mod_stochastic"}
    assert {path.stem for path in SCALE} == set(RANKS)


@every_config
def test_a_config_is_complete_and_survives_a_round_trip(path: Path) -> None:
    config = load_config(path)
    assert ModeConfig.from_dict(config.to_dict()) == config
    assert path.read_text().isascii()


@every_config
def test_a_description_names_the_command_that_runs_the_file(path: Path) -> None:
    description = load_config(path).description
    name = path.relative_to(ROOT).as_posix()
    assert re.search(rf"Run: deepspeed [^.]*train\.py --deepspeed_config {re.escape(name)}\.", description)
    assert "Expect:" in description


@every_config
def test_the_learning_rate_schedule_is_as_long_as_the_run(path: Path) -> None:
    run = load_run_config(path)
    scheduler = run.deepspeed["scheduler"]
    assert scheduler["type"] == "WarmupCosineLR"
    assert scheduler["params"]["total_num_steps"] == scheduler["params"]["warmup_num_steps"] == "auto"


@every_small
def test_a_description_states_the_true_size_and_cost(path: Path) -> None:
    run = load_run_config(path)
    total, active, training = parameters_and_flops(run, world_size=1)
    stated = f"Expect: {total / 1e6:.2f}M parameters, {active / 1e6:.2f}M of them active per token"
    assert stated in run.mode.description
    for share, other in re.findall(r"([\d.]+)% of the training FLOPs of (\S+) per step", run.mode.description):
        assert share == f"{100 * training / parameters_and_flops(load_run_config(ROOT / other), 1)[2]:.1f}"


@every_small
def test_a_small_config_runs_on_any_number_of_ranks_with_the_same_global_batch(path: Path) -> None:
    engine = load_run_config(path).engine
    for world_size in (1, 2, 4, 8):
        rows, micro_batches = engine.batch_layout(world_size)
        assert rows * micro_batches * world_size == 8


@every_small
def test_small_configs_differ_in_routing_only(path: Path) -> None:
    assert without_routing(path) == without_routing(SMALL[0])


def without_routing(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    for key in ("description", "experts", "depth"):
        document["mode"].pop(key, None)
    return document


@every_config
def test_widths_suit_grouped_products(path: Path) -> None:
    """Grouped products need rows of a multiple of 16 bytes: 8 elements of 2 bytes each."""
    config = load_config(path)
    widths = [config.model.width, config.model.ffn_width, config.model.head_width]
    widths += [config.experts.width] if config.experts is not None else []
    assert all(width % 8 == 0 for width in widths)


def test_the_controls_spend_what_they_are_compared_with() -> None:
    def processed(name: str) -> int:
        return sum(counts.processed for counts in accounting.expected_counts(small(name), rows=16))

    assert processed("moe_reduced_capacity") == processed("mode_integrated")
    kept = [[block.kept for block in accounting.expected_counts(small(name), 16)] for name in ("mod", "mod_stochastic")]
    assert kept[0] == kept[1]


@every_scale
def test_a_scale_config_is_about_as_large_as_its_name_says_and_fits(path: Path) -> None:
    run, world_size = load_run_config(path), RANKS[path.stem]
    total, active, _ = parameters_and_flops(run, world_size)
    billions = int(path.stem.removeprefix("mode_").removesuffix("b"))
    assert 0.9 < active / (billions * 1e9) < 1.1
    assert f"{total / 1e9:.1f}B parameters, {active / 1e9:.2f}B of them active" in run.mode.description
    assert f"--world_size {world_size} " in run.mode.description
    assert accounting.memory_per_rank(run, world_size).total < 80e9
    assert run.engine.precision == "bf16"
    assert run.mode.experts is not None and run.mode.experts.ep_size == 8
    assert run.mode.model.width % 64 == run.mode.experts.width % 64 == run.mode.model.vocab_size % 64 == 0


def test_the_scale_configs_show_zero_2_and_zero_3() -> None:
    assert [load_run_config(path).engine.zero_stage for path in SCALE] == [2, 3]
