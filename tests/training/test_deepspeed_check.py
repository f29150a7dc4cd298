"""DeepSpeed's half of the JSON gets our kind of message: path, value, what is legal, the nearest name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mode.config.file import load_run_config, override, run_config_from_dict
from mode.config.section import ConfigError
from mode.training.loop.engine import engine_settings
from tests.launch import TINY

ROOT = Path(__file__).parent.parent.parent
COSINE = '{"type": "WarmupCosineLR"}'


def check(*settings: str) -> dict[str, Any]:
    document = json.loads(json.dumps(TINY))
    for setting in settings:
        override(document, setting)
    return engine_settings(run_config_from_dict(document), world_size=2)


@pytest.mark.parametrize(
    ("settings", "path", "words"),
    [
        (["optimizer.type=Foo"], "optimizer.type", ['"Foo"', "one of adagrad, adam, adamw", "torch.optim: ASGD"]),
        (["optimizer.type=adamv"], "optimizer.type", ['did you mean "Adam"?']),
        (["optimizer.type=5"], "optimizer.type", ["is 5", "a string"]),
        (["optimizer.type=MuAdam"], "optimizer.type", ["mup"]),
        (['optimizer={"type": "LBFGS"}'], "optimizer.type", ['"LBFGS"', "one of adagrad"]),
        (["steps_per_print=abc"], "steps_per_print", ['"abc"', "a whole number"]),
        (["optimizer.type=Lion"], "optimizer.params.torch_adam", ["is true", "Lion takes no", "betas, lr"]),
        (["optimizer.type=SGD"], "optimizer.params.torch_adam", ["SGD takes no", "momentum"]),
        (["optimizer.type=Muon", "optimizer.params.momentun=0.9"], "optimizer.params.momentun", ['"momentum"']),
        (["optimizer.params=3"], "optimizer.params", ["is 3", "JSON object"]),
        (["optimizer.params.beta=[0.9, 0.95]"], "optimizer.params.beta", ['did you mean "betas"?']),
        (["optimizer.params.lr=-1"], "optimizer.params.lr", ["is -1", "Invalid learning rate", "default is 0.001"]),
        (["optimizer.params.lr=auto"], "optimizer.params.lr", ['is "auto"', "default is 0.001"]),
        (["optimizer.params.betas=0.9"], "optimizer.params.betas", ["is 0.9", "default is [0.9, 0.999]"]),
        (["optimizer.params.max_grad_norm=1"], "optimizer.params.max_grad_norm", ["gradient_clipping"]),
        (["optimizer={}"], "optimizer", ["AdamW"]),
        (["scheduler.type=WarmupLr"], "scheduler.type", ['"WarmupLr"', "one of LRRangeTest", '"WarmupLR"?']),
        (["scheduler.type=StepLR"], "scheduler.params.total_num_steps", ["StepLR takes no", "step_size"]),
        (["scheduler.params.total_num_step=5"], "scheduler.params.total_num_step", ['"total_num_steps"?']),
        (["scheduler.params.total_num_steps=abc"], "scheduler.params.total_num_steps", ['is "abc"']),
        (["scheduler.params.warmup_num_steps=0"], "scheduler.params.warmup_num_steps", ["is 0", "positive integer"]),
        ([f"scheduler={COSINE}"], "scheduler.params.total_num_steps", ["is missing; WarmupCosineLR needs it"]),
        (["scheduler.params=[]"], "scheduler.params", ["is []", "JSON object"]),
        (["zero_optimization.reduce_bucket_size=x"], "zero_optimization.reduce_bucket_size", ["a valid integer"]),
        (
            ["zero_optimization.offload_optimizer.device=gpu"],
            "zero_optimization.offload_optimizer.device",
            ['is "gpu"', "'none', 'cpu' or 'nvme'"],
        ),
        (
            ["zero_optimization.offload_optimizer.devic=cpu"],
            "zero_optimization.offload_optimizer.devic",
            ['did you mean "device"? Valid keys: buffer_count'],
        ),
        (["fp16.loss_scale=-1"], "fp16.loss_scale", ["is -1", ">= 0"]),
        (["tensorboard.enabled=maybe"], "tensorboard.enabled", ['is "maybe"', "boolean"]),
        (["gradient_allreduce_op=max"], "gradient_allreduce_op", ['is "max"', "['mean', 'sum']"]),
        (["communication_data_type=5"], "communication_data_type", ["is 5"]),
        (["checkpoint.tag_validation=no"], "checkpoint", ["WARN", "IGNORE", "FAIL"]),
        (["checkpoint=5"], "checkpoint", ["is 5", "JSON object"]),
        (["data_types.grad_accum_dtype=fp33"], "data_types.grad_accum_dtype", ['is "fp33"', "fp16, fp32, int8, bf16"]),
        (["amp.enabled=true"], "amp", ["has been removed", "'bf16'"]),
        (["gradient_allreduce_op=sum", "zero_optimization.stage=3"], "deepspeed", ["together", "ZeRO stage 3"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_deepspeed_refuses_is_named_with_path_and_value(settings: list[str], path: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*settings)
    assert caught.value.path == path
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ['optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}'],
        ['optimizer={"type": "lion", "params": {"lr": 0.1}}'],
        ['optimizer={"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": false, "torch_adam": true}}'],
        ['optimizer={"type": "AdamW", "params": {"lr": 0.1, "bias_correction": true}}'],
        ['optimizer={"type": "Muon", "params": {"muon_lr": 0.1, "adam_lr": 0.1, "momentum": 0.9}}'],
        [
            'optimizer={"type": "Lamb"}',
            'scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}',
        ],
        ['scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}'],
        ['scheduler={"type": "CosineAnnealingLR", "params": {"T_max": 5}}'],
        ["scheduler={}"],
        ["bf16.enabled=true", "data_types.grad_accum_dtype=bf16"],
    ],
    ids=lambda value: value[0] if value else "as it is",
)
def test_what_deepspeed_takes_is_let_through(settings: list[str]) -> None:
    assert check(*settings)["train_batch_size"] == 4


@pytest.mark.parametrize(("config", "ranks"), [("mode", 1), ("moe", 2), ("scale/mode_1b", 8), ("scale/mode_7b", 64)])
def test_shipped_files_are_let_through(config: str, ranks: int) -> None:
    engine_settings(load_run_config(ROOT / f"ds_configs/{config}.json"), ranks)


VALUES: list[Any] = [None, True, 0, -1, 3, 0.5, 1e300, "", "x", "auto", [], [1], {}, {"x": 1}, {"enabled": True}]


def test_five_hundred_broken_files_give_a_config_error_or_settings() -> None:
    rng, refused = random.Random(0), 0
    for _ in range(500):
        document = json.loads(json.dumps(TINY))
        del document["mode"]["depth"]["predictor"]
        for _ in range(rng.randrange(1, 3)):
            parts = [document, *(value for key, value in document.items() if isinstance(value, dict) and key != "mode")]
            parts += [part["params"] for part in parts if isinstance(part.get("params"), dict)]
            here = rng.choice([part for part in parts if part])
            key = rng.choice([key for key in here if key != "mode"])
            here[key if rng.random() < 0.8 else key[:-1] + rng.choice("abc")] = rng.choice(VALUES)
        try:
            settings = engine_settings(run_config_from_dict(document), world_size=1)
        except ConfigError as error:
            refused += 1
            assert str(error) and "\n" not in str(error)
        else:
            assert settings["train_batch_size"] >= 1
    assert 250 < refused < 500
