"""An engine in somebody's own script: what it refuses, what it saves and loads, and what copies of its layers are."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, distributed, nn

import mode
from mode.local_ranks import run_on_ranks
from mode.moe.layer import LocalMoE
from mode.training.loop.engine import start_process_group
from tests.launch import CONTEXT
from tests.own_model import EXPERTS, WIDTH, Case, OwnModel, batches, settings, train_step
from tests.test_own_loop import whole_weights

STEPS, SAVED = 5, 2
WARMUP = 4  # so that it is neither at its start nor at its end where a run is saved
# With a large eps: otherwise gradients that are zero but for rounding move weights as far as any.
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True, "eps": 1e-4}}}
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def start(
    case: Case, model: nn.Module | None = None, begin: Any = mode.initialize, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """(engine, its settings) around a model of somebody's own."""
    model = OwnModel(WARMUP, ep_size=case.ep_size, **EXPERTS) if model is None else model
    config = settings(case, distributed.get_world_size()) | more
    return begin(model=model, config=config, model_parameters=list(model.parameters()))[0], config


def refusal(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals() -> dict[str, str]:
    bare, ours = deepspeed.initialize, mode.initialize
    clipped, unclipped = Case(2, 0, 0.2), Case(2, 0, 0.0)
    half = {"bf16": {"enabled": True}}
    by_default = settings(clipped, 2)
    del by_default["gradient_clipping"]
    return {
        "stage 0, bare": refusal(lambda: start(clipped, begin=bare)),
        "stage 0, bare, by default": refusal(
            lambda: deepspeed.initialize(model=OwnModel(ep_size=2, **EXPERTS), config=by_default)
        ),
        "stage 0, bare, not clipped": refusal(lambda: start(unclipped, begin=bare)),
        "stage 0, bare, ep_size 1": refusal(lambda: start(Case(1, 0, 0.2), begin=bare)),
        "stage 0, bf16": refusal(lambda: start(clipped, begin=ours, **half)),
        "stage 0, fp16": refusal(lambda: start(clipped, begin=ours, fp16={"enabled": True})),
        "universal at 3, bare": refusal(lambda: start(Case(2, 3), begin=bare, **UNIVERSAL)),
        "universal at 1 with a bias, bare": refusal(lambda: start(Case(2, 1), begin=bare, **UNIVERSAL)),
        "universal by the engine itself": refusal(lambda: start(Case(2, 1), **UNIVERSAL)[0].load_checkpoint("x")),
        "universal not asked for": refusal(lambda: mode.load_universal(start(Case(2, 1))[0], "x")),
        "universal at stage 0": refusal(lambda: mode.load_universal(start(unclipped, **UNIVERSAL)[0], "x")),
        "universal from nowhere": refusal(lambda: mode.load_universal(start(Case(2, 1), **UNIVERSAL)[0], "/nowhere")),
        "round robin": refusal(
            lambda: start(Case(2, 1), zero_optimization={"stage": 1, "round_robin_gradients": True})
        ),
        "a setting nobody has checked": warned(
            lambda: start(Case(2, 1), zero_optimization={"stage": 1, "ignore_unused_parameters": True})
        ),
        "not connected": refusal(lambda: OwnModel(ep_size=2, **EXPERTS)(batches(0))),
    }


def warned(action: Any) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return "\n".join(str(each.message) for each in seen)


def norm_at_stage_0() -> tuple[float, float]:
    """(what the engine says, the norm over all parameters of one process's gradients)."""
    case = Case(2, 0, 0.2)
    engine, _ = start(case)
    train_step(engine, 0, case)
    model = OwnModel(WARMUP, **EXPERTS)
    with mode.collect_routing(model) as records:
        loss = model(batches(0))
    (loss + mode.auxiliary_loss(records)).backward()
    squares = [p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None]
    return float(engine.get_global_grad_norm()), float(torch.stack(squares).sum().sqrt())


def course(engine: Any, case: Case, steps: range) -> list[float]:
    """The global loss of every step."""
    losses = torch.tensor([train_step(engine, step, case) for step in steps], dtype=torch.float64)
    distributed.all_reduce(losses)
    return (losses / distributed.get_world_size()).tolist()


def uninterrupted(case: Case) -> dict[str, Any]:
    engine, _ = start(case, **ADAM)
    return {"losses": course(engine, case, range(STEPS)), "weights": whole_weights(engine)}


def save(case: Case, folder: Path) -> None:
    engine, _ = start(case, **ADAM)
    course(engine, case, range(SAVED))
    engine.save_checkpoint(str(folder), tag="saved", client_state={"args": argparse.Namespace(step=SAVED)})
    distributed.barrier()


def finish(engine: Any, case: Case, client_state: dict[str, Any]) -> dict[str, Any]:
    step = client_state["args"].step
    state = dict(engine.module.named_buffers())
    biases = [bias.clone() for name, bias in state.items() if name.endswith("bias_J")]
    done = [int(count) for name, count in state.items() if name.endswith("steps_done")]
    losses = course(engine, case, range(step, STEPS))
    return {"losses": losses, "weights": whole_weights(engine), "biases": biases, "done": done}


def resumed(case: Case, folder: Path) -> dict[str, Any]:
    engine, _ = start(case, **ADAM)
    _, client_state = engine.load_checkpoint(str(folder), tag="saved")
    return finish(engine, case, client_state)


def convert(folder: Path) -> None:
    """As `python -m deepspeed.checkpoint.ds_to_universal` does."""
    if distributed.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(
                argparse.Namespace(
                    input_folder=str(folder / "saved"),
                    output_folder=str(folder / "universal"),
                    inject_missing_state=True,
                    **options,
                )
            )
    distributed.barrier()


def moved(case: Case, folder: Path) -> dict[str, Any]:
    engine, _ = start(case, **ADAM, **UNIVERSAL)
    return finish(engine, case, mode.load_universal(engine, folder / "universal"))


RESUMED = [Case(2, 1), Case(2, 3)]
MOVED = {2: [Case(2, 3), Case(2, 1)], 1: [Case(1, 1), Case(1, 3)]}  # number of ranks: layouts


def checkpoints(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in RESUMED:
        folder = shared / f"stage_{case.stage}"
        save(case, folder)
        convert(folder)
        found[f"whole {case}"] = uninterrupted(case)
        found[f"resumed {case}"] = resumed(case, folder)
    return found | all_moved(shared)


def all_moved(shared: Path) -> dict[str, Any]:
    return {
        f"{case} to {target}": moved(target, shared / f"stage_{case.stage}")
        for case in RESUMED
        for target in MOVED[distributed.get_world_size()]
    }


def copies() -> dict[str, Any]:
    """What becomes of layers that an engine has connected when they are copied."""
    engine, _ = start(Case(2, 1))
    alone, _ = start(Case(1, 1))
    again = copy.deepcopy(engine.module)
    connected, _ = start(Case(2, 1), again)
    ids = batches(0)
    return {
        "deepcopy": refusal(lambda: copy.deepcopy(engine.module)(ids)),
        "ep_size 1": refusal(lambda: copy.deepcopy(alone.module)(ids)),
        "difference of a copy that is connected again": float(connected(ids) - engine(ids)),
    }


def layout_of_initial_weights() -> dict[str, bool]:
    """Whether this rank's weights are those of the layer that holds all experts."""
    options: dict[str, Any] = {"num_experts": 4, "k": 2, "expert_width": 8, "num_shared": 1, "seed": 5, "layer": 2}
    part, whole = mode.MoE(WIDTH, ep_size=2, **options), LocalMoE(WIDTH, **options)
    found = {}
    for name, weight in part.named_parameters():
        expected = whole.get_parameter(name)
        if name.startswith("experts."):
            expected = expected[2 * distributed.get_rank() :][:2]
        found[name] = torch.equal(weight, expected)
    return found


def global_balance() -> dict[str, float]:
    """The mean over ranks of `l_aux` and its gradient, less what loops over all ranks' tokens give."""
    options: dict[str, Any] = {"num_experts": 4, "k": 2, "expert_width": 8, "num_no_ops": 2, "no_op_fraction": 0.25}
    layer = mode.MoE(WIDTH, balance_weight=0.7, balance_scope="global", layer=1, **options).double()
    layer.set_deepspeed_parallelism()
    generator = torch.Generator().manual_seed(4)
    ranks = [torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    weight = layer.router.scorer.weight
    _, l_aux, _ = layer(ranks[distributed.get_rank()])
    (gradient,) = torch.autograd.grad(l_aux, weight)
    both = torch.cat([l_aux.detach().view(1), gradient.flatten()])
    distributed.all_reduce(both)
    shares, scores = [0.0] * 5, [torch.zeros((), dtype=torch.float64)] * 5
    for token in torch.cat(ranks).flatten(0, 1):
        probabilities = torch.softmax(weight @ token, dim=0)
        for j in probabilities.argsort(descending=True)[:2].tolist():
            shares[min(j, 4)] += 1 / (2 * 12)
        scores = [scores[j] + (probabilities[j] if j < 4 else probabilities[4:].sum()) / 12 for j in range(5)]
    targets = [0.75 / 4] * 4 + [0.25]
    expected = 0.7 * sum(f * p / t for f, p, t in zip(shares, scores, targets, strict=True))
    (expected_gradient,) = torch.autograd.grad(expected, weight)
    wanted = torch.cat([expected.detach().view(1), expected_gradient.flatten()])
    return {"difference": float((both / 2 - wanted).abs().max()), "loss": float(expected)}


def own_expert() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


MODULES: dict[str, Any] = {key: value for key, value in EXPERTS.items() if key != "expert_width"}


def train_modules(case: Case) -> dict[str, Any]:
    """Experts of any module on two ranks."""
    if case.partitioned:
        with deepspeed.zero.Init(config_dict_or_path=settings(case, 2)):
            model = OwnModel(WARMUP, expert=own_expert(), ep_size=case.ep_size, **MODULES)
    else:
        model = OwnModel(WARMUP, expert=own_expert(), ep_size=case.ep_size, **MODULES)
    engine, _ = start(case, model)
    return {"losses": course(engine, case, range(3)), "weights": whole_weights(engine)}


MODULE_CASES = [Case(2, 1), Case(2, 3), Case(2, 3, partitioned=True), Case(1, 3, partitioned=True)]


def alone(shared: Path) -> dict[str, Any]:
    start_process_group()
    return all_moved(shared)


def on_a_rank(shared: Path) -> dict[str, Any]:
    start_process_group()
    return {
        "refusals": refusals(),
        "norm": norm_at_stage_0(),
        "checkpoints": checkpoints(shared),
        "copies": copies(),
        "initial": layout_of_initial_weights(),
        "balance": global_balance(),
        "modules": {case: train_modules(case) for case in MODULE_CASES},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(on_a_rank, 2, folder, seconds=400, context=CONTEXT)


@pytest.fixture(scope="module")
def one_rank(ranks: Any, folder: Path) -> dict[str, Any]:
    return run_on_ranks(alone, 1, folder, seconds=200, context=CONTEXT)[0]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("stage 0, bare", ("gradient_clipping: is 0.2", "stage 0", "mode.initialize")),
        ("stage 0, bare, by default", ("gradient_clipping: is 1", "mode.initialize")),
        ("stage 0, bare, not clipped", ("no error",)),
        ("stage 0, bare, ep_size 1", ("no error",)),
        ("stage 0, bf16", ("zero_optimization.stage: is 0", "gradient norm", "stage 1")),
        ("stage 0, fp16", ("zero_optimization.stage: is 0", "fp16", "use 1")),
        (
            "universal at 3, bare",
            ("checkpoint.load_universal", "optimizer step", "mode.initialize", "mode.load_universal"),
        ),
        ("universal at 1 with a bias, bare", ("checkpoint.load_universal", "selection bias", "mode.initialize")),
        ("universal by the engine itself", ("checkpoint.load_universal", "mode.load_universal(engine, folder)")),
        ("universal not asked for", ("checkpoint.load_universal: is false", '"load_universal": true')),
        ("universal at stage 0", ("zero_optimization.stage: is 0", "use 1, 2 or 3")),
        ("universal from nowhere", ("/nowhere", "is not a universal checkpoint", "ds_to_universal")),
        ("round robin", ("zero_optimization.round_robin_gradients", "leave it out", "0.19.8")),
        ("not connected", ("RuntimeError", "2 of 4 experts", "mode.initialize")),
    ],
)
def test_what_an_engine_would_get_wrong_is_refused_on_every_rank(ranks: Any, what: str, words: tuple[str, ...]) -> None:
    for found in ranks:
        assert all(word in found["refusals"][what] for word in words), found["refusals"][what]


def test_a_setting_that_nobody_has_checked_is_warned_about_once(ranks: Any) -> None:
    first, second = (found["refusals"]["a setting nobody has checked"] for found in ranks)
    assert "zero_optimization.ignore_unused_parameters" in first and "ignore_unused" not in second


def test_the_norm_at_stage_0_is_that_of_the_whole_model(ranks: Any) -> None:
    for found in ranks:
        engine, whole = found["norm"]
        assert engine == pytest.approx(whole, rel=1e-5) and whole > 0.2, "or nothing is clipped"


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_a_resumed_loop_repeats_the_uninterrupted_one_to_the_bit(ranks: Any, case: Case) -> None:
    for found in ranks:
        whole, resumed = (found["checkpoints"][f"{name} {case}"] for name in ("whole", "resumed"))
        assert resumed["losses"] == whole["losses"][SAVED:]
        assert all(torch.equal(resumed["weights"][name], weight) for name, weight in whole["weights"].items())
        assert resumed["done"] == [SAVED] and all(bias.any() for bias in resumed["biases"])


@pytest.mark.parametrize("target", [*MOVED[1], *MOVED[2]], ids=str)
@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_a_universal_checkpoint_goes_on_in_another_layout(ranks: Any, one_rank: Any, case: Case, target: Case) -> None:
    for found in ranks:
        whole = found["checkpoints"][f"whole {case}"]
        moved = (found["checkpoints"] | one_rank)[f"{case} to {target}"]
        biases = found["checkpoints"][f"resumed {case}"]["biases"]
        assert all(torch.equal(a, b) for a, b in zip(moved["biases"], biases, strict=True))
        assert moved["done"] == [SAVED]
        assert moved["losses"] == pytest.approx(whole["losses"][SAVED:], abs=2e-6)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(
                moved["weights"][name], weight, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n} {m}"
            )


def test_a_copy_of_connected_layers_is_unconnected_says_so_and_can_be_connected(ranks: Any) -> None:
    for found in ranks:
        assert "not connected to the other ranks" in found["copies"]["deepcopy"], found["copies"]["deepcopy"]
        assert found["copies"]["ep_size 1"] == "no error"
        assert found["copies"]["difference of a copy that is connected again"] == 0


def test_initial_weights_do_not_depend_on_the_layout(ranks: Any) -> None:
    for found in ranks:
        assert len(found["initial"]) == 7 and all(found["initial"].values()), found["initial"]


def test_the_global_balance_is_that_of_all_ranks_tokens(ranks: Any) -> None:
    for found in ranks:
        assert found["balance"]["difference"] < 1e-12 and found["balance"]["loss"] > 0.5


@pytest.mark.parametrize("case", MODULE_CASES, ids=str)
def test_experts_of_any_module_train_as_in_one_process(ranks: Any, case: Case) -> None:
    model = OwnModel(WARMUP, expert=own_expert(), **MODULES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(3):
        with mode.collect_routing(model) as records:
            loss = model(batches(step))
        (loss + mode.auxiliary_loss(records)).backward()
        optimizer.step()
        optimizer.zero_grad()
        mode.after_step(model, records)
        losses.append(loss.item())
    weights: dict[str, Tensor] = model.state_dict()
    for found in ranks:
        assert found["modules"][case]["losses"] == pytest.approx(losses, abs=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(
                found["modules"][case]["weights"][name], weight, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n} {m}"
            )
