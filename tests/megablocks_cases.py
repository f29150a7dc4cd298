"""MegaBlocks' own code on a CPU, compared with the loop reference: run by `test_megablocks.py` in a process of its own.

Prints one JSON object: for every case "same", or what is wrong.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mode.moe.dispatch import LocalDispatcher
from mode.moe.layer import LocalMoE
from mode.moe.megablocks import MegaBlocksDispatcher, Permuted, megablocks_experts
from mode.records import collect_routing
from mode.transformer.model import ModeTransformer
from tests import megablocks_stand_in
from tests.helpers import assert_same_with_gradients, make_config, spread_weights

TOLERANCE = 2**-7  # one bfloat16 rounding: the reference rounds and sums in another order here and there


def make_layer(**experts: Any) -> LocalMoE:
    config = make_config(experts={"backend": "megablocks", **experts})
    return spread_weights(LocalMoE(config.model.width, config=config.experts).bfloat16())


def tokens(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(num_tokens, 16, generator=generator).bfloat16().requires_grad_()


def plain_loop(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """One expert after the other, and nothing written out: autograd does the rest."""
    outputs = []
    for expert, x_ND in enumerate(x_QD.split(counts_e.tolist())):
        hidden_NF = F.silu(F.linear(x_ND, w1_eFD[expert])) * F.linear(x_ND, w3_eFD[expert])
        outputs.append(F.linear(hidden_NF, w2_eDF[expert]))
    return torch.cat(outputs)


def by_the_reference(layer: LocalMoE, x_TD: torch.Tensor) -> torch.Tensor:
    """The same layer, dispatched and computed without MegaBlocks."""
    dispatcher, compute = layer.experts.dispatcher, layer.experts.compute
    layer.experts.dispatcher, layer.experts.compute = LocalDispatcher(), plain_loop
    out_TD = layer(x_TD)[0]
    layer.experts.dispatcher, layer.experts.compute = dispatcher, compute
    return out_TD


def compare(layer: LocalMoE, x_TD: torch.Tensor) -> Any:
    with collect_routing(layer) as records:
        actual = layer(x_TD)[0]
    inputs = {"x": x_TD, **dict(layer.named_parameters())}
    assert_same_with_gradients(actual, by_the_reference(layer, x_TD), inputs, TOLERANCE)
    return records[0].routing


def every_choice_processed(num_experts: int, top_k: int, num_tokens: int = 13) -> None:
    layer = make_layer(num_experts=num_experts, top_k=top_k)
    assert isinstance(layer.experts.dispatcher, MegaBlocksDispatcher)
    megablocks_stand_in.calls.clear()
    compare(layer, tokens(num_tokens))
    used = megablocks_stand_in.calls
    assert used[:6] == ["sort", "histogram", "inclusive_cumsum", "gmm", "gmm", "gmm"], used


def no_token() -> None:
    compare(make_layer(), tokens(0))


def one_expert_without_a_token() -> None:
    layer = make_layer(balance_bias={})
    layer.router.bias_J[2] = -1e4
    routing = compare(layer, tokens(9))
    assert routing.processed_counts_E()[2] == 0
    layer(tokens(9))[0].float().square().sum().backward()
    assert not layer.experts.w1.grad[2].any() and layer.experts.w1.grad[1].any()


def all_tokens_to_one_expert() -> None:
    layer = make_layer(balance_bias={}, top_k=1)
    layer.router.bias_J[3] = 1e4
    assert compare(layer, tokens(9)).processed_counts_E().tolist() == [0, 0, 0, 9]


def no_ops() -> None:
    layer = make_layer(num_no_ops=2, no_op_fraction=0.5)
    assert type(layer.experts.dispatcher) is LocalDispatcher
    assert compare(layer, tokens(13)).num_no_op() > 0


def a_capacity() -> None:
    layer = make_layer(capacity_factor=0.5)
    assert type(layer.experts.dispatcher) is LocalDispatcher
    assert compare(layer, tokens(13)).num_dropped() > 0


def only_no_ops() -> None:
    layer = make_layer(top_k=1, num_no_ops=1, no_op_fraction=0.5, balance_bias={})
    layer.router.bias_J[-1] = 1e4
    assert compare(layer, tokens(6)).num_processed() == 0


def shared_experts_and_renormalized_gates() -> None:
    compare(make_layer(num_shared=1, renormalize=True), tokens(13))


def a_strided_input() -> None:
    layer, x_TD = make_layer(), tokens(13)
    strided_TD = x_TD.T.contiguous().T
    assert not strided_TD.is_contiguous()
    assert torch.equal(layer(strided_TD)[0], layer(x_TD)[0])


def the_permutation() -> None:
    layer, x_TD = make_layer(), tokens(13)
    routing = layer.router(x_TD, (1, len(x_TD)))
    actual, expected = layer.experts.dispatcher.dispatch(x_TD, routing), LocalDispatcher().sort(x_TD, routing)
    assert isinstance(actual, Permuted)
    top_k = routing.choices_TK.shape[1]
    pairs = {
        "x_QD": (actual.x_QD, expected.x_QD),
        "counts_e": (actual.counts_e, expected.counts_e),
        "tokens": (actual.order_A.long() // top_k, expected.rows.tokens_R),
        "gates": (actual.gates_A[actual.order_A], expected.gates_R),
    }
    for name, (ours, theirs) in pairs.items():
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name


def its_own_grouped_layer() -> None:
    """MegaBlocks' `GroupedGLU` keeps its second weight transposed; with that it computes the same."""
    from megablocks.layers.glu import memory_optimized_grouped_glu

    experts, counts_e = make_layer().experts, torch.tensor([3, 0, 6, 4])
    x_QD = tokens(13)
    actual = megablocks_experts(x_QD, counts_e, experts.w1, experts.w2, experts.w3)
    w2_eFD = experts.w2.transpose(1, 2).contiguous()
    expected = memory_optimized_grouped_glu(x_QD, experts.w1, experts.w3, w2_eFD, counts_e, F.silu)
    inputs = {"x": x_QD, **dict(experts.named_parameters())}
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = torch.autograd.grad(actual, list(inputs.values()), upstream.clone())
    theirs = torch.autograd.grad(expected, list(inputs.values()), upstream.clone())  # it overwrites what it is given
    for name, mine, its in zip(inputs, found, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=4 * TOLERANCE, atol=4 * TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def a_whole_model() -> None:
    """Same weights, same loss, with activation checkpointing; and its state fits a model of another backend."""
    model = {"activation_checkpointing": True}
    config = make_config(model=model, experts={"backend": "megablocks"}, depth={})
    ours = ModeTransformer(config).bfloat16()
    theirs = ModeTransformer(config.with_backend("loop")).bfloat16()
    theirs.load_state_dict(ours.state_dict())
    ids = torch.arange(32).view(2, 16)
    losses = [model(ids, labels=ids).loss for model in (ours, theirs)]
    torch.testing.assert_close(losses[0], losses[1], rtol=TOLERANCE, atol=TOLERANCE)
    for loss in losses:
        loss.backward()
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, mine), its in pairs:
        torch.testing.assert_close(mine.grad, its.grad, rtol=0.1, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


CASES: dict[str, Callable[[], None]] = {
    "one_choice_per_token": lambda: every_choice_processed(4, 1),
    "two_choices_per_token": lambda: every_choice_processed(4, 2),
    "three_choices_among_five_experts": lambda: every_choice_processed(5, 3),
    "one_expert": lambda: every_choice_processed(1, 1),
    "one_token": lambda: every_choice_processed(4, 2, num_tokens=1),
    **{
        case.__name__: case
        for case in (
            no_token,
            one_expert_without_a_token,
            all_tokens_to_one_expert,
            no_ops,
            a_capacity,
            only_no_ops,
            shared_experts_and_renormalized_gates,
            a_strided_input,
            the_permutation,
            its_own_grouped_layer,
            a_whole_model,
        )
    },
}


def main() -> None:
    megablocks_stand_in.install()
    import megablocks
    from triton.runtime.interpreter import InterpretedFunction

    assert (Path(megablocks.__file__).parent / "layers" / "dmoe.py").exists()  # the real one
    assert isinstance(megablocks.backend.kernels._padded_copy.fn, InterpretedFunction)
    results = {}
    for name, case in CASES.items():
        try:
            case()
            results[name] = "same"
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
