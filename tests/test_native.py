"""The experts of a CPU in compiled code: results, who gets them, and machines that cannot compile them.

That the whole layer equals nested loops, in every edge, is tests/test_moe.py's, for this backend as for the others.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mode.config.section import ConfigError
from mode.moe.experts import ROW_EXPERTS, choose_backend, fused_rows
from mode.moe.layer import LocalMoE
from mode.ops import mix, operators
from mode.ops.library import _compiled
from mode.ops.swiglu import loop_experts
from mode.transformer.model import ModeTransformer
from tests import launch
from tests.helpers import make_config, needs_kernels, spread_weights

pytestmark = needs_kernels
CPU, GPU = torch.device("cpu"), torch.device("cuda")
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}


@pytest.fixture(autouse=True)
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def inputs(num_tokens, num_experts, width, hidden, dtype):
    """x, w1, w2, w3."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, width), *[(num_experts, *s) for s in ((hidden, width), (width, hidden), (hidden, width))]]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def with_gradients(compute, *leaves):
    out = compute(*leaves)
    out.square().sum().backward()
    found = [out.detach(), *(leaf.grad.clone() for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    return found


SIZES = {  # rows of each expert; whether three cores take whole experts or share each product
    "even": [40, 41, 39, 40, 38, 42],
    "one with most of them": [200, 3, 0, 5],
    "fewer experts than cores": [70, 70],
    "one expert": [90],
    "one row each": [1, 1, 1],
    "none at all": [0, 0, 0],
    "some without": [0, 30, 0, 31, 29, 0],
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [(16, 24), (33, 17)], ids=["whole vectors", "parts of them"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sorted_rows_equal_the_loop_in_outputs_and_every_gradient(sizes, dtype, width, threads):
    torch.set_num_threads(threads)
    counts_e = torch.tensor(sizes)
    x_QD, *weights = inputs(sum(sizes), len(sizes), *width, dtype)
    actual = with_gradients(lambda x, *w: fused_rows(x, counts_e, *w), x_QD, *weights)
    expected = with_gradients(lambda x, *w: loop_experts(x, counts_e, *w), x_QD, *weights)
    for name, a, b in zip(("out", "x", "w1", "w2", "w3"), actual, expected, strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[dtype] * scale, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_choices_that_are_no_expert_add_nothing_and_have_no_gradient(top_k):
    x_TD, *weights = inputs(50, 4, 16, 24, torch.float64)
    generator = torch.Generator().manual_seed(top_k)
    choices_TK = torch.stack([torch.randperm(8, generator=generator)[:top_k] - 2 for _ in range(50)])  # -2 .. 5
    gates_TK = torch.rand(50, top_k, generator=generator, dtype=torch.float64).requires_grad_()

    def one_by_one(x_TD, gates_TK, w1, w2, w3):
        rows = []
        for token, choices in enumerate(choices_TK.tolist()):
            row = x_TD[token] * 0
            for k, e in enumerate(choices):
                if 0 <= e < 4:
                    hidden = torch.nn.functional.silu(w1[e] @ x_TD[token]) * (w3[e] @ x_TD[token])
                    row = row + gates_TK[token, k] * (w2[e] @ hidden)
            rows.append(row)
        return torch.stack(rows)

    actual = with_gradients(lambda x, g, *w: mix(x, choices_TK, g, *w), x_TD, gates_TK, *weights)
    expected = with_gradients(one_by_one, x_TD, gates_TK, *weights)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    real_TK = (choices_TK >= 0) & (choices_TK < 4)
    assert not actual[2][~real_TK].any() and actual[2][real_TK].all()
    assert not actual[0][~real_TK.any(dim=1)].any()


def results(backend, tokens=640):
    """Output and gradients of a layer of six experts, some tokens of which no expert gets."""
    config = make_config(experts={"backend": backend, "num_experts": 6, "num_no_ops": 1, "no_op_fraction": 0.2})
    layer = spread_weights(LocalMoE(config.model.width, config=config.experts))
    x_TD = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out_TD = layer(x_TD)[0]
    out_TD.square().sum().backward()
    return [out_TD.detach(), x_TD.grad, *(parameter.grad for parameter in layer.parameters())]


def test_results_are_the_same_every_time_whichever_core_takes_what():
    first = results("native")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(results("native"), first, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("favourite", [0.0, 3.0], ids=["even", "one expert has most"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_many_tokens_that_no_expert_has(top_k, favourite, threads):
    """Several pieces of idle tokens, which are cleared by whichever core is free."""
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for backend in ("native", "loop"):
        no_ops = {"num_no_ops": 2, "no_op_fraction": 0.7, "balance_bias": {}}
        config = make_config(experts={"backend": backend, "num_experts": 6, "top_k": top_k, **no_ops})
        layer = spread_weights(LocalMoE(config.model.width, config=config.experts))
        layer.router.bias_J[0] = favourite
        layer.router.bias_J[-2:] = 2.0
        x_TD = torch.randn(1500, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.empty(1500 * 16).fill_(float("nan"))  # what is not cleared may have been this
        out_TD = layer(x_TD)[0]
        assert layer.router(x_TD, (1, 1500)).num_no_op() > 512
        out_TD.square().sum().backward()
        found.append([out_TD.detach(), x_TD.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.set_num_threads(before)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def make_layer(**experts):
    config = make_config(experts={"num_experts": 3, "top_k": 3, **experts})
    return spread_weights(LocalMoE(config.model.width, config=config.experts))


def test_without_gradients_and_in_inference_mode_too():
    layer, x_TD = make_layer(backend="native"), torch.randn(20, 16)
    expected = layer(x_TD)[0].detach()
    with torch.inference_mode():
        assert torch.equal(layer(x_TD)[0], expected)
    with torch.no_grad():
        assert torch.equal(layer(x_TD)[0], expected)


@pytest.mark.parametrize("backend", ["native", "loop", "grouped_mm"])
def test_autocast_around_backward_changes_nothing(backend):
    layer = make_layer(backend=backend)
    gradients = []
    for enabled in (False, True):
        x_TD = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = ROW_EXPERTS[backend](x_TD, torch.tensor([7, 7, 6]), *layer.experts.parameters()).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss.backward()
        gradients.append([x_TD.grad, *(parameter.grad.clone() for parameter in layer.experts.parameters())])
        layer.zero_grad()
    tolerance = 0.02 if backend == "grouped_mm" else 0  # autocast reaches torch's grouped product
    for plain, cast in zip(*gradients, strict=True):
        torch.testing.assert_close(cast, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_what_counts_operations_sees_all_of_them(backend):
    layer = make_layer(backend=backend)
    flops = 3 * 2 * 21 * 16 * layer.experts.w1.shape[1]
    with FlopCounterMode(display=False) as counter:
        ROW_EXPERTS[backend](torch.randn(21, 16), torch.tensor([7, 7, 7]), *layer.experts.parameters())
    assert counter.get_total_flops() == flops
    router = 2 * 21 * 16 * 3
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(21, 16))
    assert counter.get_total_flops() == 3 * flops + router


def test_shapes_that_do_not_fit_are_refused():
    x_TD, *weights = inputs(6, 2, 16, 24, torch.float32)
    one, two = torch.zeros(6, 1, dtype=torch.int64), torch.zeros(6, 2, dtype=torch.int64)
    for choices_TK, gates_TK, given in (
        (one[:5], torch.ones(5, 1), weights),
        (two, torch.ones(6, 1), weights),
        (one, torch.ones(6, 1), [weights[0], weights[1][:, :8], weights[2]]),
        (one, torch.ones(6, 1), [weights[0], weights[1], weights[2][:1]]),
    ):
        with pytest.raises(RuntimeError, match=r"mix: shapes must be tokens \[T, D\], choices and gates"):
            mix(x_TD, choices_TK, gates_TK, *given)


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_what_traces_operations_gets_those_of_torch(backend):
    layer, x_TD = make_layer(backend=backend), torch.randn(20, 16)
    traced = torch.compile(layer, backend="eager")(x_TD)[0]
    torch.testing.assert_close(traced, layer(x_TD)[0])


# ---------------------------------------------------------------------------------------------------
# Who gets it


def test_auto_takes_it_on_a_cpu_for_what_it_computes():
    assert choose_backend("auto", CPU, torch.float32, (16, 24)) == ("native", "compiled for this CPU")
    assert choose_backend("auto", CPU, torch.float64, (10, 30))[0] == "native"  # any width
    assert choose_backend("auto", CPU, torch.bfloat16, (16, 24)) == (
        "grouped_mm",
        "native experts are in float32 or float64 and this model is bfloat16",
    )
    assert choose_backend("auto", GPU, torch.float32, (16, 24))[0] == "grouped_mm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_auto_layer_sorts_its_tokens_only_where_it_must(dtype, monkeypatch):
    layer, sorted_ones = make_layer(backend="auto").to(dtype), []
    sort = operators.sort_by_expert
    monkeypatch.setattr(operators, "sort_by_expert", lambda *given: sorted_ones.append(1) or sort(*given))
    layer(torch.randn(20, 16, dtype=dtype))
    assert len(sorted_ones) == (dtype == torch.bfloat16)


def test_it_is_refused_for_other_devices_and_precisions():
    with pytest.raises(
        ConfigError, match='"native"; native experts are for CPUs, and this is a cuda device; use "auto"'
    ):
        choose_backend("native", GPU, torch.float32, (16, 24))
    with pytest.raises(ConfigError, match='"native"; native experts are in float32 or float64 and this model is'):
        choose_backend("native", CPU, torch.bfloat16, (16, 24))
    layer = make_layer(backend="native").bfloat16()
    with pytest.raises(ConfigError, match="this model is bfloat16"):
        layer(torch.randn(4, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["native", "megablocks"])
def test_weights_of_such_a_run_are_loaded_on_any_device(backend):
    config = make_config(experts={"backend": backend})
    weights = ModeTransformer(make_config(experts={})).weights()
    assert ModeTransformer.from_weights(config, weights).config.experts.backend == "auto"


def two_threads() -> None:
    torch.set_num_threads(2)


def test_a_run_takes_it_and_trains_as_the_loop_does(tmp_path):
    config = launch.write_tiny(tmp_path)
    losses = {}
    for backend in ("auto", "loop"):
        settings = [f"mode.experts.backend={backend}", "zero_optimization.stage=3", "mode.train.steps=6"]
        arguments = [word for setting in settings for word in ("--set", setting)]
        job = launch.run(
            ["--deepspeed_config", str(config), "--output_dir", str(tmp_path / backend), *arguments],
            tmp_path / f"{backend}.log",
            before=two_threads,
        )
        assert ("native (compiled for this CPU)" in job.output()) == (backend == "auto")
        losses[backend] = [row["loss/total"] for row in launch.metrics(tmp_path / backend) if "loss/total" in row]
    assert len(losses["auto"]) == 6
    assert losses["auto"] == pytest.approx(losses["loop"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------
# Compiling

ASK = """
import torch
from mode.moe.experts import choose_backend
from mode.config.section import ConfigError
for name in ("auto", "native"):
    try:
        print(*choose_backend(name, torch.device("cpu"), torch.float32, (16, 24)), sep=": ")
    except ConfigError as error:
        print(error)
"""


def ask(cache, **environment):
    """A process whose cache folder is `cache`."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(launch.ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_is_compiled_once_for_all_processes_and_then_kept(tmp_path):
    both = [ask(tmp_path / "both") for _ in range(2)]
    together = [process.communicate(timeout=300) for process in both]
    later = ask(tmp_path / "both", CXX="no-such-compiler").communicate(timeout=300)
    for out, _ in [*together, later]:
        assert out.splitlines() == ["native: compiled for this CPU", "native: as configured"]
    assert sum("compiling kernels" in errors for _, errors in together) == 1
    assert "compiling" not in later[1]
    assert len(list((tmp_path / "both/mode/native").glob("*.so"))) == 1


def test_a_damaged_library_is_made_anew(tmp_path):
    damaged = tmp_path / "mode/native" / _compiled().name
    damaged.parent.mkdir(parents=True)
    damaged.write_text("half a library")
    out, errors = ask(tmp_path).communicate(timeout=300)
    assert out.splitlines() == ["native: compiled for this CPU", "native: as configured"]
    assert errors.count("compiling kernels") == 1 and damaged.stat().st_size > 10_000


def test_without_a_compiler_auto_takes_another_and_says_why(tmp_path):
    auto, named = ask(tmp_path, CXX="no-such-compiler").communicate(timeout=300)[0].splitlines()
    assert auto == "grouped_mm: there is no C++ compiler (no-such-compiler)"
    assert named.startswith('experts.backend: is "native"; there is no C++ compiler (no-such-compiler); install one')


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho warning >&2\necho 'native.cpp:1:1: fatal error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    auto, named = ask(tmp_path, CXX=str(compiler)).communicate(timeout=300)[0].splitlines()
    reason = "the kernels of CPUs do not compile here (native.cpp:1:1: fatal error: no such thing)"
    assert auto == f"grouped_mm: {reason}" and f'is "native"; {reason}' in named
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path):
    (tmp_path / "mode").write_text("a file where the folder should be")
    auto, named = ask(tmp_path).communicate(timeout=300)[0].splitlines()
    assert auto.startswith("grouped_mm: the kernels of CPUs cannot be compiled or loaded (") and "mode/native" in auto
    assert named.startswith('experts.backend: is "native"; the kernels of CPUs cannot be compiled or loaded')
