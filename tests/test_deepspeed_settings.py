"""The table of DeepSpeed's setting names is what DeepSpeed reads, and what it does not read is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed.monitor.config import DeepSpeedMonitorConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from mode.config.deepspeed_settings import SETTINGS
from mode.config.file import load_run_config, run_config_from_dict
from mode.config.section import ConfigError
from tests.launch import TINY

ROOT = Path(__file__).parent.parent
FLAGSHIP = str(ROOT / "ds_configs/mode.json")
READ_BY_INITIALIZE = {"data_parallel_size", "sequence_parallel_size"}  # before the configuration is


class Asked(dict):  # type: ignore[type-arg]
    """A JSON object that notes which names it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__({key: Asked(value) if isinstance(value, dict) else value for key, value in values.items()})
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def __copy__(self) -> Asked:
        return self

    def keys(self) -> Any:
        return self


def models(of: type[DeepSpeedConfigModel] = DeepSpeedConfigModel) -> Iterator[type[DeepSpeedConfigModel]]:
    for model in of.__subclasses__():
        yield model
        yield from models(model)


def names_in(section: str) -> set[str]:
    """What DeepSpeed reads of a section: asked for one by one, or the fields of its model."""
    asked = Asked({"train_batch_size": 8, section: {"type": "x", "no_such_name": 1}})
    try:
        DeepSpeedConfig(asked)
    except ValidationError as error:
        model: Any = next(each for each in models() if each.__name__ == error.title)
        if model is DeepSpeedMonitorConfig:
            model = model.model_fields[section].annotation
        return {name for key, field in model.model_fields.items() for name in (key, field.alias or key)}
    except Exception:
        return set()  # a plain value, or a feature that was removed
    return set(dict.get(asked, section).names)


def test_the_table_holds_the_names_that_deepspeed_reads() -> None:
    asked = Asked({"train_batch_size": 8})
    DeepSpeedConfig(asked)
    assert set(SETTINGS) == asked.names | READ_BY_INITIALIZE
    for section, names in SETTINGS.items():
        assert set(names) == names_in(section), section


@pytest.mark.parametrize(
    ("setting", "named", "meant"),
    [
        ("steps=20", "steps", '"mode.train.steps"'),
        ("lr=0.1", "lr", '"optimizer.params.lr"'),
        ("num_experts=4", "num_experts", '"mode.experts.num_experts"'),
        ("foo.bar=3", "foo.bar", "valid keys: mode, activation_checkpointing, "),
        ("train.steps=20", "train.steps", '"mode.train.steps"'),
        ("num_expert=4", "num_expert", '"mode.experts.num_experts"'),
        ("seed=1", "seed", '"mode.seed" or "data_efficiency.seed"'),
        ("width=8", "width", '"mode.model.width" or "mode.experts.width" or "mode.depth.predictor.width"'),
        ("stage=2", "stage", '"zero_optimization.stage"'),
        ("optimizer.lr=0.1", "optimizer.lr", '"optimizer.params.lr"'),
        ("optimiser.type=SGD", "optimiser.type", '"optimizer"'),
        ("zero_optimization.stag=2", "zero_optimization.stag", '"stage"? Valid keys: allgather_bucket_size, '),
        ("scheduler.typ=OneCycle", "scheduler.typ", '"type"? Valid keys: params, type'),
        ("activation_checkpointing.partition_activation=true", None, '"partition_activations"'),
        ("data_types.grad_accum_dtyp=fp32", None, '"grad_accum_dtype"'),
    ],
)
def test_a_setting_nobody_reads_is_refused_with_the_nearest_that_is_read(
    setting: str, named: str | None, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(FLAGSHIP, [setting])
    assert str(caught.value).startswith(f"{FLAGSHIP}: {named or setting.partition('=')[0]}: unknown key")
    assert meant in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["steps", "foo", "zero_optimization.stage", "mode.train.steps", "", "Mode", "seed"])
def test_a_file_with_a_key_nobody_reads_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="unknown key, which DeepSpeed would ignore"):
        run_config_from_dict(TINY | {key: 1})
    with pytest.raises(ConfigError, match="unknown key"):
        run_config_from_dict(TINY | {"zero_optimization": {"stage": 1, key + "_": 1}})


@pytest.mark.parametrize("config", sorted(ROOT.glob("ds_configs/**/*.json")), ids=lambda path: path.stem)
def test_every_misspelling_of_a_shipped_key_is_refused(config: Path) -> None:
    document = json.loads(config.read_text())
    run_config_from_dict(document)
    for key in document:
        for wrong in (key[:-1], key + "s", key.upper(), key.replace("_", "-", 1) + "-"):
            if wrong not in SETTINGS:
                with pytest.raises(ConfigError, match="unknown key"):
                    run_config_from_dict({wrong if name == key else name: value for name, value in document.items()})


def test_settings_seen_in_the_wild_are_accepted() -> None:
    wild = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "communication_data_type": "fp32",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_prefetch_bucket_size": "auto",
        },
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        "aio": {"block_size": 262144, "queue_depth": 32, "single_submit": False, "overlap_events": True},
        "wandb": {"enabled": False, "group": "a", "team": "b", "project": "c"},
        "csv_monitor": {"enabled": False, "output_path": "x", "job_name": "y"},
        "tensorboard": {"enabled": True, "output_path": "x", "job_name": "y"},
        "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "autotuning": {"enabled": False, "fast": True},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        "compile": {"deepcompile": False},
    }
    document = {key: value for key, value in TINY.items() if key != "train_batch_size"} | wild
    assert run_config_from_dict(document).deepspeed == {key: value for key, value in document.items() if key != "mode"}


def test_a_file_without_our_section_says_so() -> None:
    document = {key: value for key, value in TINY.items() if key != "mode"}
    with pytest.raises(ConfigError, match='mode: the section is missing; add the JSON object "mode"'):
        run_config_from_dict(document)
