"""Every wrong configuration is one readable `ConfigError`; no other exception ever escapes."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mode.config.file import load_config, load_run_config, read_json, run_config_from_dict
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig

GOOD = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "mode": {
        "description": "for tests",
        "seed": 3,
        "model": {
            "vocab_size": 100,
            "num_layers": 4,
            "width": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_width": 64,
            "sequence_length": 100,
        },
        "experts": {
            "num_experts": 8,
            "top_k": 2,
            "width": 32,
            "num_no_ops": 2,
            "no_op_fraction": 0.5,
            "balance_loss": {"weight": 0.01, "scope": "sequence"},
            "balance_bias": {"rate": 0.01},
            "capacity_factor": 1.25,
            "z_loss_weight": 0.001,
            "backend": "grouped_mm",
            "ep_size": 2,
        },
        "depth": {"capacity_fraction": 0.125, "every": 2, "predictor": {"width": 16}, "aux_loss": None},
        "data": {"source": "files", "files": {"paths": ["a.txt"]}, "tokenizer": "bytes"},
        "train": {"steps": 10},
    },
}


def changed(path: str, value: object) -> dict:
    document = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    here = document
    for key in parents:
        here = here[key]
    if value is ...:
        del here[last]
    else:
        here[last] = value
    return document


def test_a_good_file_loads(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD))
    run = load_run_config(path)
    assert load_config(path) == run.mode
    assert run.mode.experts.num_columns == 10
    assert (run.engine.zero_stage, run.engine.precision) == (2, "bf16")
    assert run.engine.batch_layout(world_size=2) == (4, 2)
    assert "mode" not in run.deepspeed and run.deepspeed["bf16"] == {"enabled": True}


def test_a_config_round_trips_through_json():
    config = run_config_from_dict(GOOD).mode
    assert ModeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# (path changed, value, the path the error names, words it must hold)
WRONG = [
    ("mode", ..., "mode", ["section is missing", "JSON object"]),
    ("mode", None, "mode", ["null", "JSON object"]),
    ("mode", [], "mode", ["[]", "JSON object"]),
    ("mode.modle", {}, "mode.modle", ["unknown key", 'did you mean "model"']),
    ("mode.model", ..., "mode.model", ["missing"]),
    ("mode.model.width", ..., "mode.model.width", ["missing", "whole number"]),
    ("mode.model.widht", 32, "mode.model.widht", ["unknown key", 'did you mean "width"']),
    ("mode.model.width", "32", "mode.model.width", ['"32"', "whole number"]),
    ("mode.model.width", 32.0, "mode.model.width", ["32.0", "whole number"]),
    ("mode.model.width", True, "mode.model.width", ["true", "whole number"]),
    ("mode.model.width", None, "mode.model.width", ["null", "whole number"]),
    ("mode.model.width", 2**40, "mode.model.width", ["1099511627776", "at most 1048576"]),
    ("mode.model.sequence_length", 2**50, "mode.model.sequence_length", ["1125899906842624", "at most 1048576"]),
    ("mode.model.vocab_size", 2**53, "mode.model.vocab_size", ["at most 16777216"]),
    ("mode.experts.width", 2**40, "mode.experts.width", ["at most 16777216"]),
    ("mode.model.width", 10**400, "mode.model.width", ["whole number"]),
    ("mode.model.num_heads", 5, "mode.model.num_heads", ["5", "divide width = 32"]),
    ("mode.model.num_heads", 32, "mode.model.num_heads", ["even"]),
    ("mode.model.num_kv_heads", 3, "mode.model.num_kv_heads", ["3", "num_heads = 4"]),
    ("mode.model.norm_eps", float("nan"), "mode.model.norm_eps", ["NaN", "above 0"]),
    ("mode.model.norm_eps", 10**400, "mode.model.norm_eps", ["above 0"]),
    ("mode.model.tied_head", 1, "mode.model.tied_head", ["true or false"]),
    ("mode.experts.top_k", 11, "mode.experts.top_k", ["11", "10 columns"]),
    ("mode.experts.ep_size", 3, "mode.experts.ep_size", ["3", "num_experts = 8"]),
    ("mode.experts.num_no_ops", 0, "mode.experts.no_op_fraction", ["0.5", "num_no_ops is 0", "both"]),
    ("mode.experts.no_op_fraction", 0, "mode.experts.no_op_fraction", ["num_no_ops is 2"]),
    ("mode.experts.no_op_fraction", 1, "mode.experts.no_op_fraction", ["below 1"]),
    ("mode.experts.num_no_ops", 1, None, []),
    ("mode.experts.capacity_factor", 0, "mode.experts.capacity_factor", ["above 0", "or null"]),
    ("mode.experts.capacity_factor", 0.001, "mode.experts.capacity_factor", ["at least one", "null for dropless"]),
    ("mode.experts.width", 30, "mode.experts.width", ["30", "multiple of 8", "loop"]),
    ("mode.experts.backend", "groupedmm", "mode.experts.backend", ['did you mean "grouped_mm"']),
    ("mode.experts.balance_loss.scope", "rank", "mode.experts.balance_loss.scope", ['"rank"', "sequence", "global"]),
    ("mode.experts.balance_loss", 0.1, "mode.experts.balance_loss", ["0.1", "JSON object, or null"]),
    ("mode.depth.capacity_fraction", 0.0, "mode.depth.capacity_fraction", ["above 0 and at most 1"]),
    ("mode.depth.capacity_fraction", 1.1, "mode.depth.capacity_fraction", ["above 0 and at most 1"]),
    ("mode.depth.capacity_fraction", 0.001, "mode.depth.capacity_fraction", ["0.1 of", "at least one", "0.01 or more"]),
    ("mode.depth.warmup_fraction", 1, "mode.depth.warmup_fraction", ["1", "at least 0 and below 1"]),
    ("mode.depth.warmup_fraction", 0.5, None, []),
    (
        "mode.depth",
        {"capacity_fraction": 0.5, "warmup_fraction": 0.5, "selection": "token_choice"},
        "mode.depth.warmup_fraction",
        ["0.5", "token_choice", "set it to 0"],
    ),
    ("mode.depth.every", 5, "mode.depth.every", ["5", "num_layers = 4"]),
    ("mode.depth.every", 0, "mode.depth.every", ["at least 1"]),
    ("mode.depth.gate", "one", "mode.depth.gate", ["no language-model gradient"]),
    ("mode.depth.selection", "stochastic", "mode.depth.predictor", ["null"]),
    ("mode.depth.selection", "token_choice", "mode.depth.predictor", ["null"]),
    ("mode.depth.balance_weight", 0.1, "mode.depth.balance_weight", ["token_choice"]),
    ("mode.depth.causal", "predictr", "mode.depth.causal", ['did you mean "predictor"']),
    ("mode.depth.causal", 1, "mode.depth.causal", ['"predictor", "router", or null']),
    ("mode.depth.causal", "router", None, []),
    (
        "mode.depth",
        {"capacity_fraction": 0.5, "causal": "predictor"},
        "mode.depth.causal",
        ["predictor is null", "set depth.predictor"],
    ),
    ("mode.depth.enabled", False, "mode.depth.enabled", ["unknown key"]),
    ("mode.data.files", None, "mode.data.files", ["must be set when source"]),
    ("mode.data.files.paths", [], "mode.data.files.paths", ["non-empty list"]),
    ("mode.data.files.paths", " ", "mode.data.files.paths", ["a non-empty string, or a non-empty list of them"]),
    ("mode.data.tokenizer", "pretrained", "mode.data.pretrained", ["must name a tokenizer"]),
    ("mode.train.tokens", 5, "mode.train.steps", ["exactly one", "steps and tokens"]),
    ("mode.train.steps", None, "mode.train.steps", ["exactly one", "none given"]),
    ("mode.seed", -1, "mode.seed", ["-1", "at least 0"]),
    ("mode.description", "", "mode.description", ["non-empty string"]),
    ("depth", {}, "depth", ['did you mean "mode.depth"']),
    ("MODE", {}, "MODE", ['did you mean "mode"']),
    ("", 1, '""', ["unknown key"]),
    ("bfloat16", {"enabled": True}, "bfloat16", ['write "bf16"']),
    ("bf16", {"enable": True}, "bf16.enable", ["unknown key", 'did you mean "enabled"']),
    ("managed_gradient_accumulation", True, None, []),
    (
        "mode.experts",
        {"num_experts": 2, "top_k": 1, "width": 8, "renormalize": True},
        "mode.experts.renormalize",
        ["1"],
    ),
    ("mode.experts", {"num_experts": 3, "top_k": 10, "width": 8, "num_no_ops": 7, "no_op_fraction": 0.7}, None, []),
    ("mode.experts", {"num_experts": 2, "top_k": 3, "width": 8, "num_no_ops": 1, "no_op_fraction": 1 / 3}, None, []),
    ("mode.model.a\nb", 1, "mode.model.a\nb", ["unknown key"]),
    (
        "mode.depth",
        {"selection": "token_choice", "capacity_fraction": 1, "balance_weight": 0.1},
        "mode.depth.balance_weight",
        ["nothing to balance"],
    ),
    ("gradient_cliping", 1.0, "gradient_cliping", ["DeepSpeed would ignore", "gradient_clipping"]),
    ("zero_optimization", 2, "zero_optimization", ["JSON object"]),
    ("zero_optimization.stage", 4, "zero_optimization.stage", ["4", "at most 3"]),
    ("bf16", True, "bf16", ["enabled"]),
    ("fp16", {"enabled": True}, "fp16.enabled", ["one of them"]),
    ("train_micro_batch_size_per_gpu", 0, "train_micro_batch_size_per_gpu", ["at least 1"]),
    ("train_micro_batch_size_per_gpu", ..., "train_micro_batch_size_per_gpu", ["train_batch_size"]),
]


@pytest.mark.parametrize(("path", "value", "named", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_value_is_named_with_its_path_and_what_is_legal(path, value, named, words):
    document = changed(path, value)
    if named is None:
        run_config_from_dict(document)
        return
    with pytest.raises(ConfigError) as caught:
        run_config_from_dict(document)
    assert caught.value.path == named
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_unreachable_no_op_share_is_refused():
    with pytest.raises(ConfigError, match="cannot reach; it must be between 0 and 0.25"):
        run_config_from_dict(changed("mode.experts", {**GOOD["mode"]["experts"], "num_no_ops": 1, "top_k": 4}))


def test_a_capacity_below_one_token_is_refused_with_either_batch_setting_and_with_depth_routing():
    experts = {**GOOD["mode"]["experts"], "capacity_factor": 0.03}  # 400 tokens: 1.5 per expert; 1/8 of them: 0.19
    document = changed("mode.experts", experts)
    with pytest.raises(ConfigError, match=r"take 0\.1875 of a micro-batch"):
        run_config_from_dict(document)
    document["mode"]["depth"] = None
    run_config_from_dict(document)
    document["mode"]["experts"]["capacity_factor"] = 1e-9
    document["train_batch_size"] = document.pop("train_micro_batch_size_per_gpu")
    with pytest.raises(ConfigError, match="capacity_factor"):
        run_config_from_dict(document)


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    document = changed("train_batch_size", 20)
    with pytest.raises(ConfigError, match=r"is 20, which does not divide into 2 ranks with .*gpu = 4 and .*steps = 2"):
        run_config_from_dict(document).engine.batch_layout(world_size=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON: line 1"),
        ('{"mode": }', "not valid JSON: line 1, column 10"),
        ("[1]", "must be a JSON object"),
        ('{"mode": {}, "mode": {}}', "mode: stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested too deeply"),
        ('{"mode": ' + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
        ("1" * 10_000, "not usable JSON"),
    ],
)
def test_a_file_that_is_not_a_configuration_says_so(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)


def test_a_file_of_twenty_thousand_keys_is_read_in_one_pass(tmp_path):
    keys = [f"key {number}" for number in range(20_000)]
    path = tmp_path / "many.json"
    path.write_text(json.dumps(dict.fromkeys(keys, 1)))
    assert list(read_json(path)) == keys
    path.write_text(json.dumps(dict.fromkeys(keys, 1))[:-1] + ', "key 7": 2}')
    with pytest.raises(ConfigError, match="key 7: stands twice"):
        read_json(path)


def test_a_setting_given_by_set_is_not_nested_too_deeply(tmp_path):
    path = tmp_path / "good.json"
    path.write_text(json.dumps(GOOD))
    for setting in ("mode.a" + ".a" * 900 + "=1", "pipeline=" + "[" * 900 + "]" * 900):
        with pytest.raises(ConfigError, match="nested too deeply; it may have 50 levels"):
            load_run_config(path, [setting])


def test_a_file_that_is_missing_or_not_text_says_so(tmp_path):
    with pytest.raises(ConfigError, match="none.json: file: cannot be read: No such file"):
        load_config(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "binary.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_section_built_in_python_is_checked_too():
    with pytest.raises(ConfigError, match="num_heads"):
        ModeConfig.from_dict({"model": {**GOOD["mode"]["model"], "num_heads": 7}})


VALUES = [
    *(None, True, False, 0, 1, 2, 3, 7, 8, 64, -1, 10**30, 0.5, 1.5, 1e300, -0.0, float("nan"), float("inf")),
    *("", "x", "learned", "global", "\ud800", [], [None], ["a"], {}, {"weight": 1}, {"": {}}, [[[]]]),
]


def mutate(document: dict, rng: random.Random) -> None:
    """One random injury: change, remove, rename or move a value anywhere in the tree."""
    objects = [document]
    for here in objects:
        objects.extend(value for value in here.values() if isinstance(value, dict))
    here = rng.choice([part for part in objects if part] or [document])
    key = rng.choice(list(here) or ["mode"])
    match rng.randrange(5):
        case 0:
            here[key] = copy.deepcopy(rng.choice(VALUES))
        case 1:
            here.pop(key, None)
        case 2:
            name = list(key) or ["x"]
            name[rng.randrange(len(name))] = rng.choice("abcdef_ \u00e9")
            here["".join(name)] = here.pop(key, None)
        case 3:
            rng.choice(objects)[key] = copy.deepcopy(here.get(key))
        case 4:
            here[key] = rng.randrange(-4, 300) if rng.random() < 0.5 else rng.uniform(-1, 3)


def test_two_thousand_broken_configs_give_a_config_error_or_a_valid_config():
    rng, outcomes = random.Random(0), {"valid": 0, "refused": 0}
    for _ in range(2000):
        document = copy.deepcopy(GOOD)
        for _ in range(rng.randrange(1, 4)):
            mutate(document, rng)
        try:
            run = run_config_from_dict(document)
        except ConfigError as error:
            outcomes["refused"] += 1
            assert str(error) and "\n" not in str(error)
        else:
            outcomes["valid"] += 1
            assert ModeConfig.from_dict(run.mode.to_dict()) == run.mode
    assert outcomes["refused"] > 1000 and outcomes["valid"] > 100


def test_the_public_names_and_accounting_need_no_torch():
    code = (
        "import sys, mode; from mode import accounting, load_config, ConfigError\n"
        "print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True, text=True)
    assert done.stdout == "[]\n"
