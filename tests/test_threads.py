"""Experts side by side on the cores of a CPU."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mode.model.transformer import ModeTransformer
from mode.moe.backends import choose_backend, threads
from mode.moe.backends.threads import side_by_side
from mode.moe.layer import MoELayer
from mode.section import ConfigError
from tests import launch
from tests.helpers import make_config, spread_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def with_tokens(sizes):
    return [expert for expert, size in enumerate(sizes) if size]


def watch(*sizes):
    """[(expert, the thread that did it, how many threads its products may use)], in the order they were begun."""
    seen = []

    def work(expert):
        assert not torch.is_grad_enabled()
        seen.append((expert, threading.current_thread().name, torch.get_num_threads()))
        time.sleep(0.05)  # so that no thread can take all

    with torch.no_grad():
        side_by_side(work, list(sizes))
    assert sorted(expert for expert, _, _ in seen) == with_tokens(sizes)
    assert torch.get_num_threads() == 3
    return seen


def test_each_core_takes_the_largest_expert_that_is_left():
    seen = watch(4, 9, 5, 8, 0, 6, 7)
    assert {expert for expert, _, _ in seen[:3]} == {1, 3, 6}
    assert len({thread for _, thread, _ in seen}) == 3
    assert all(for_products == 1 for _, _, for_products in seen)


@pytest.mark.parametrize(
    "sizes",
    [(), (0, 0, 0), (7,), (7, 7, 0), (90, 5, 5), (5, 5, 5, 5)],
    ids=["no experts", "no tokens", "one", "fewer than cores", "one with most", "one too many"],
)
def test_where_cores_would_idle_they_share_each_product(sizes):
    seen = watch(*sizes)
    assert [expert for expert, _, _ in seen] == with_tokens(sizes)
    assert {thread for _, thread, _ in seen} <= {threading.current_thread().name}
    assert all(for_products == 3 for _, _, for_products in seen)


def test_one_core_does_all_by_itself():
    torch.set_num_threads(1)
    seen = []
    side_by_side(lambda expert: seen.append((expert, threading.current_thread())), [4, 4, 4])
    assert seen == [(expert, threading.current_thread()) for expert in range(3)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_goes_wrong_in_any_thread_is_raised_when_all_have_stopped(failing):
    begun, done = [], []

    def work(expert):
        begun.append(expert)
        time.sleep(0.05)
        if expert == failing:
            raise RuntimeError("out of memory")
        time.sleep(0.1)
        done.append(expert)

    with pytest.raises(RuntimeError, match="out of memory"):
        side_by_side(work, [4, 4, 4])
    assert sorted([*done, failing]) == sorted(begun) == [0, 1, 2]
    assert torch.get_num_threads() == 3


def results(backend, dtype, tokens=64):
    """Output and gradients of a layer of six experts, some tokens of which no expert gets."""
    config = make_config(experts={"backend": backend, "num_experts": 6, "num_no_ops": 1, "no_op_fraction": 0.2})
    layer = spread_weights(MoELayer(config.experts, config.model.width).to(dtype))
    x_TD = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out_TD, routing = layer(x_TD)
    out_TD.square().sum().backward()
    return [out_TD, x_TD.grad, *(parameter.grad for parameter in layer.parameters())], routing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_are_those_of_the_loop_bit_by_bit_and_every_time(dtype, monkeypatch):
    monkeypatch.setattr(threads, "MAX_UNEVENNESS", 2.0)
    found = [results("threads", dtype)[0] for _ in range(5)]
    torch.set_num_threads(1)
    expected, routing = results("loop", dtype)
    sizes = sorted(routing.processed_counts_E().tolist(), reverse=True)
    assert sizes[-1] > 0 and routing.num_no_op() > 0 and threads._evenly_busy(sizes, 3)
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


def test_without_gradients_and_in_inference_mode_too():
    config = make_config(experts={"backend": "threads", "num_experts": 3, "top_k": 3})
    layer = spread_weights(MoELayer(config.experts, config.model.width))
    x_TD = torch.randn(20, 16)
    expected = layer(x_TD)[0].detach()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x_TD)[0], expected, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(layer(x_TD)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["threads", "loop", "grouped_mm"])
def test_autocast_around_backward_changes_nothing(backend):
    config = make_config(experts={"backend": backend, "num_experts": 3, "top_k": 3})
    layer = spread_weights(MoELayer(config.experts, config.model.width))
    gradients = []
    for enabled in (False, True):
        x_TD = torch.randn(20, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = layer.experts(x_TD, torch.tensor([7, 7, 6])).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss.backward()
        gradients.append([x_TD.grad, *(parameter.grad.clone() for parameter in layer.experts.parameters())])
        layer.zero_grad()
    tolerance = 0.02 if backend == "grouped_mm" else 0  # autocast reaches torch's grouped product
    for plain, cast in zip(*gradients, strict=True):
        torch.testing.assert_close(cast, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item())


def test_threads_that_come_later_have_as_many_for_their_products_as_ever():
    seen = []

    def work(expert):
        late = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        late.start()
        late.join()

    for cores in (3, 2):
        torch.set_num_threads(cores)
        side_by_side(work, [4, 4, 4, 4, 4, 4])
        assert seen == [cores] * 6 and torch.get_num_threads() == cores
        seen.clear()


def test_what_counts_operations_sees_all_of_them():
    config = make_config(experts={"backend": "threads", "num_experts": 3, "top_k": 3})
    layer = spread_weights(MoELayer(config.experts, config.model.width))
    with FlopCounterMode(display=False) as counter:
        layer.experts(torch.randn(21, 16), torch.tensor([7, 7, 7]))
    assert counter.get_total_flops() == 3 * 2 * 21 * 16 * config.experts.width


def test_auto_takes_it_on_a_cpu_of_several_cores_only():
    assert choose_backend("auto", CPU, torch.float32, (16, 24)) == ("threads", "a CPU, 3 threads")
    assert choose_backend("auto", CPU, torch.float64, (10, 30))[0] == "threads"  # any dtype, any width
    assert choose_backend("auto", GPU, torch.float32, (16, 24))[0] == "grouped_mm"
    torch.set_num_threads(1)
    assert choose_backend("auto", CPU, torch.float32, (16, 24))[0] == "grouped_mm"


def two_threads() -> None:
    torch.set_num_threads(2)


def test_a_run_of_two_threads_takes_it_and_trains_as_the_loop_does(tmp_path):
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
        assert ("threads (a CPU, 2 threads)" in job.output()) == (backend == "auto")
        losses[backend] = [row["loss/total"] for row in launch.metrics(tmp_path / backend) if "loss/total" in row]
    assert len(losses["auto"]) == 6
    assert losses["auto"] == pytest.approx(losses["loop"], rel=1e-5)


@pytest.mark.parametrize("backend", ["threads", "megablocks"])
def test_weights_of_such_a_run_are_loaded_on_any_device(backend):
    config = make_config(experts={"backend": backend})
    weights = ModeTransformer(make_config(experts={})).weights()
    assert ModeTransformer.from_weights(config, weights).config.experts.backend == "auto"


def test_it_is_refused_on_other_devices():
    with pytest.raises(ConfigError, match='"threads", which is for CPUs, and this is a cuda device; use "auto"'):
        choose_backend("threads", GPU, torch.float32, (16, 24))
    config = make_config(experts={"backend": "threads"})
    with torch.device("meta"):
        experts = MoELayer(config.experts, config.model.width).experts
        with pytest.raises(ConfigError, match="this is a meta device"):
            experts(torch.empty(4, 16), torch.tensor([1, 1, 1, 1]))


def test_a_forked_process_has_threads_of_its_own():
    """Of the parent's none is there: waiting for one would never end."""
    assert len({thread for _, thread, _ in watch(5, 5, 5)}) == 3
    child = multiprocessing.get_context("fork").Process(target=watch, args=(5, 5, 5))
    child.start()
    child.join(60)
    hangs = child.is_alive()
    if hangs:
        child.kill()
        child.join()
    assert not hangs and child.exitcode == 0
