"""`DepthRouted` around a block in plain torch: what is taken along, learnt, warmed up and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mode
from mode.records import DepthRouting
from tests.helpers import assert_same_with_gradients, spread_weights

WIDTH, LENGTH, ROWS = 8, 10, 3
AXES = {"rotary": 1, "mask": (2, 3), "documents": 1}


class PlainBlock(nn.Module):
    """Attention of one head over earlier tokens, with every kind of argument that has one entry per token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> tuple[Tensor, str]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if rotary is not None:
            cos, sin = rotary
            q, k = (each * cos + each.roll(WIDTH // 2, dims=-1) * sin for each in (q, k))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(len(x), -1, -1)
        if documents is not None:
            seen = seen & (documents.unsqueeze(1) == documents.unsqueeze(2))
        if attention_mask is not None:
            real = attention_mask.bool()
            seen = (seen & real.unsqueeze(1)) | ~real.unsqueeze(2)
        scores = (q @ k.mT).masked_fill(~seen, -1e9)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -1e9) if mask.dtype == torch.bool else scores + mask[:, 0]
        return x + scale * self.out(torch.tanh(scores.softmax(-1) @ v)), "second"


def routed(capacity_fraction: float = 0.4, **settings: Any) -> mode.DepthRouted:
    settings = {"per_token": AXES, "layer": 0, **settings}
    return spread_weights(mode.DepthRouted(PlainBlock(), WIDTH, capacity_fraction, **settings).double())


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(rows: int = ROWS) -> dict[str, dict[str, Any]]:
    """Rotary tables for each row or for all, a mask that is bool or added, documents, padding."""
    angles = torch.arange(LENGTH).view(1, LENGTH, 1) * torch.linspace(1, 2, WIDTH)
    tables = (angles.cos().double(), angles.sin().double())
    window = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-4).expand(rows, 1, -1, -1)
    documents = torch.arange(LENGTH).expand(rows, -1) // 4
    padding = (torch.arange(LENGTH) < torch.tensor([LENGTH, 6, 1]).unsqueeze(1)).long()
    return {
        "nothing": {},
        "rotary tables of all rows": {"rotary": tables},
        "rotary tables of each row": {"rotary": tuple(each.expand(rows, -1, -1) for each in tables)},
        "a boolean mask": {"mask": window},
        "an added mask of all rows": {"mask": random(1, 1, LENGTH, LENGTH, seed=4)},
        "documents": {"documents": documents},
        "padding on the right": {"attention_mask": padding, "rotary": tables},
        "padding on the left": {"attention_mask": padding.flip(1), "rotary": tables, "mask": window},
        "all": {"rotary": tables, "mask": window, "documents": documents, "scale": 0.5},
    }


def run(layer: mode.DepthRouted, x: Tensor, **given: Any) -> tuple[Tensor, DepthRouting]:
    with mode.collect_routing(layer) as records:
        out, second = layer(x, **given)
    assert second == "second"
    assert [record.layer for record in records] == [layer]
    return out, records[0].routing


def entries(name: str, value: Any, row: int, kept: Tensor) -> Any:
    """Of one row's kept tokens, by plain indexing."""
    if isinstance(value, tuple):
        return tuple(entries(name, each, row, kept) for each in value)
    own = value[[min(row, len(value) - 1)]]
    return own[:, :, kept][..., kept] if name == "mask" else own[:, kept]


def on_the_kept_alone(layer: mode.DepthRouted, x: Tensor, routing: DepthRouting, given: dict[str, Any]) -> Tensor:
    rows = []
    for row, own in enumerate(x):
        kept = routing.kept_BL()[row].nonzero().flatten()
        taken = {name: v if name == "scale" else entries(name, v, row, kept) for name, v in given.items()}
        update = layer.block(own[None, kept], **taken)[0][0] - own[kept]
        rows.append(own.index_add(0, kept, own[kept] @ layer.router.scorer.weight.T * update))
    return torch.stack(rows)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("selection", ["learned", "token_choice"])
@pytest.mark.parametrize("kind", arguments())
def test_named_arguments_are_taken_along_with_the_kept_tokens(kind, selection, training):
    layer, given = routed(selection=selection).train(training), arguments()[kind]
    x = random(ROWS, LENGTH, WIDTH).requires_grad_()
    out, routing = run(layer, x, **given)
    expected = on_the_kept_alone(layer, x, routing, given)
    assert_same_with_gradients(out, expected, {"x": x, **dict(layer.named_parameters())}, tolerance=1e-10)
    assert routing.kept_BL().any() and not routing.kept_BL().all()


def test_arguments_by_position_are_the_same_as_by_name():
    layer, given, x = routed(), arguments()["all"], random(ROWS, LENGTH, WIDTH)
    by_position = layer(x, given["rotary"], given["mask"], given["documents"], scale=0.5)[0]
    assert torch.equal(by_position, layer(x, **given)[0])


def test_padding_takes_no_capacity_and_is_no_part_of_the_losses():
    layer = routed(0.5, aux_weight=1.0, predictor_width=4)
    x, padding = random(ROWS, LENGTH, WIDTH), arguments()["padding on the right"]["attention_mask"]
    with mode.collect_routing(layer) as records:
        layer(x, attention_mask=padding)
    record, real = records[0], padding.bool()
    assert record.routing.kept_BL().sum(1).tolist() == [5, 5, 1]
    assert not (record.routing.kept_BL() & ~real).any()
    assert record.routing.num_tokens() == real.sum()
    kept = record.routing.kept_BL().double()[real]
    for name, logits in (("depth_aux", record.routing.logits_BL), ("depth_predictor", record.routing.predicted_BL)):
        expected = F.binary_cross_entropy_with_logits(logits[real], kept)
        torch.testing.assert_close(record.losses[name], expected, rtol=1e-12, atol=1e-12)
    x = torch.where(real.unsqueeze(-1), x, 100 * random(*x.shape, seed=9))
    with mode.collect_routing(layer) as others:
        layer(x, attention_mask=padding)
    torch.testing.assert_close(mode.auxiliary_loss(others), mode.auxiliary_loss(records), rtol=1e-12, atol=1e-12)


def test_the_predictors_loss_trains_the_predictor_alone_and_the_auxiliary_loss_the_router():
    for settings, trained in (({"predictor_width": 4}, "router.predictor."), ({"aux_weight": 0.5}, "router.scorer.")):
        layer, x = routed(**settings), random(ROWS, LENGTH, WIDTH)
        with mode.collect_routing(layer) as records:
            layer(x)
        mode.auxiliary_loss(records).backward()
        moved = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
        assert moved and all(name.startswith(trained) for name in moved)


def test_the_predictor_decides_in_evaluation_unless_the_router_is_asked_to():
    x = random(ROWS, LENGTH, WIDTH)
    by_predictor, predicting = run(routed(predictor_width=4).eval(), x)
    by_router, routing = run(routed(predictor_width=4, causal="router").eval(), x)
    assert torch.equal(predicting.kept_BL(), predicting.predicted_BL > 0)
    assert torch.equal(routing.kept_BL(), routing.logits_BL > 0)
    assert not torch.equal(by_predictor, by_router)


def test_token_choice_keeps_who_wants_up_to_the_capacity_and_its_balance_loss_has_a_gradient():
    layer, x = routed(0.3, selection="token_choice", gate="sigmoid", balance_weight=0.1), random(ROWS, LENGTH, WIDTH)
    with mode.collect_routing(layer) as records:
        layer(x)
    for logits, kept in zip(records[0].routing.logits_BL, records[0].routing.kept_BL(), strict=True):
        wanting = logits.argsort(descending=True)[:3]
        assert kept.nonzero().flatten().tolist() == sorted(wanting[logits[wanting] > 0].tolist())
    mode.auxiliary_loss(records).backward()
    assert layer.router.scorer.weight.grad.any()


def test_chance_keeps_other_tokens_each_time_in_training_and_the_same_in_evaluation():
    layer, x = routed(selection="stochastic", gate="one"), random(ROWS, LENGTH, WIDTH)
    torch.manual_seed(0)
    first, second = (run(layer, x)[1].kept_BL() for _ in range(2))
    assert not torch.equal(first, second) and first.sum(1).tolist() == second.sum(1).tolist() == [4] * ROWS
    layer.eval()
    first, second = (run(layer, x)[1].kept_BL() for _ in range(2))
    assert torch.equal(first, second) and first.any()


def test_the_capacity_falls_with_the_steps_and_goes_on_after_a_load_or_copy():
    layer, x = routed(0.2, warmup_steps=4), random(ROWS, LENGTH, WIDTH)
    kept = []

    def step(layer: mode.DepthRouted) -> None:
        with mode.collect_routing(layer) as records:
            layer(x)
        kept.append(records[0].routing.kept_BS.shape[1])
        mode.after_step(layer, records)

    for _ in range(2):
        run(layer, x)  # a forward pass alone counts nothing
        step(layer)
    resumed = routed(0.2, warmup_steps=4)
    run(resumed, x)
    resumed.load_state_dict(layer.state_dict())
    step(resumed)
    for _ in range(2):
        step(copied := copy.deepcopy(resumed))
        resumed = copied
    assert kept == [8, 6, 4, 2, 2]
    assert layer.state_dict()["steps_done"] == 2
    assert "steps_done" not in routed().state_dict()


def test_a_token_choice_batch_that_nobody_enters_passes_through_with_zero_gradients():
    layer, x = routed(selection="token_choice"), random(ROWS, LENGTH, WIDTH)
    with torch.no_grad():
        layer.router.scorer.weight.zero_()  # logit 0 is not above 0
    out, routing = run(layer, x)
    assert torch.equal(out, x) and routing.num_kept() == 0
    out.square().sum().backward()
    for name, parameter in layer.block.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


X = torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64)
BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "two axes": ({"x": X[0]}, r"x has shape \(10, 8\); it must be \[rows, tokens, 8\]"),
    "another width": ({"x": X[..., :4]}, r"x has shape \(3, 10, 4\)"),
    "documents too short": (
        {"documents": torch.zeros(ROWS, 4)},
        r"documents has shape \(3, 4\).*10 tokens in its axis 1",
    ),
    "documents of other rows": ({"documents": torch.zeros(2, LENGTH)}, r"documents has shape \(2, 10\).*needs 3 rows"),
    "a mask without heads": ({"mask": torch.zeros(ROWS, LENGTH, LENGTH)}, "mask has shape .*10 tokens in its axis 3"),
    "rotary as a number": ({"rotary": (0.5, 0.5)}, "rotary is a float; .* must be a tensor"),
    "an attention mask too short": (
        {"attention_mask": torch.ones(ROWS, 4).bool()},
        r"attention_mask is torch.bool of shape",
    ),
    "a float 2-D mask": ({"attention_mask": torch.zeros(ROWS, LENGTH)}, "float32 of shape .* of booleans or integers"),
    "an integer 4-D mask": ({"attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH).long()}, "int64 of shape"),
    "an attention mask of three axes": (
        {"attention_mask": torch.ones(ROWS, LENGTH, LENGTH).bool()},
        "attention_mask is",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_wrong_input_is_named_with_its_shape(case):
    given, message = BAD_INPUTS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        routed()(**{"x_BLD": given.get("x", X), **{name: value for name, value in given.items() if name != "x"}})


WARM = mode.DepthConfig(capacity_fraction=0.5, warmup_fraction=0.5)
BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "an argument the block has not": ({"per_token": {"positions": 1}}, "per_token names 'positions', but PlainBlock"),
    "the axis of the rows": ({"per_token": {"documents": 0}}, r"per_token\['documents'\] is 0; give the axis"),
    "three axes": ({"per_token": {"mask": (1, 2, 3)}}, "or two of a mask"),
    "a share above 1": ({"capacity_fraction": 1.5}, "capacity_fraction"),
    "no such selection": ({"selection": "random"}, "selection.*learned"),
    "gate one of a learned router": ({"gate": "one"}, "gate.*no language-model gradient"),
    "a predictor of chance": ({"selection": "stochastic", "predictor_width": 4, "gate": "one"}, "predictor"),
    "a balance loss of a learned router": ({"balance_weight": 0.1}, "balance_weight.*token_choice"),
    "causal by a predictor that is not there": ({"causal": "predictor"}, "causal"),
    "a warm-up of unknown steps": ({"config": WARM}, "config.warmup_fraction is 0.5.*warmup_steps"),
    "a negative warm-up": ({"warmup_steps": -1}, "warmup_steps is -1"),
    "a warm-up of token choice": (
        {"selection": "token_choice", "warmup_steps": 3},
        "warmup_steps is 3 with .*token_choice",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_wrong_setting_is_named(case):
    settings, message = BAD_SETTINGS[case]
    with pytest.raises(ValueError, match=message):
        mode.DepthRouted(PlainBlock(), WIDTH, **settings)
