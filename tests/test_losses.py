"""Loss terms: right values, right minima, and gradients that reach exactly whom they should."""

from __future__ import annotations

import math

import pytest
import torch

from mode.config.settings import BalanceLossConfig
from mode.depth.losses import depth_balance
from mode.layers import balance
from mode.moe.losses import expert_balance, target_shares
from mode.records import DepthRouting, ExpertRouting
from mode.transformer.losses import cross_entropy
from mode.transformer.model import ModeTransformer
from tests.helpers import make_config

IDS = torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(0))
FULL = {
    "experts": {
        "num_no_ops": 1,
        "no_op_fraction": 0.25,
        "balance_loss": {},
        "z_loss_weight": 0.001,
    },
    "depth": {"predictor": {"width": 8}, "aux_loss": {}},
    "model": {"num_layers": 4},
}


def reached(loss: torch.Tensor, model: ModeTransformer) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return {name for name, g in zip(names, found, strict=True) if g is not None and g.abs().max() > 1e-6}


def test_cross_entropy_scores_each_position_on_the_next_label_and_leaves_out_ignored_ones():
    logits = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 4], [0, 0, 3, -100]])
    expected = [
        -math.log(math.exp(logits[b, i, labels[b, i + 1]]) / sum(math.exp(v) for v in logits[b, i]))
        for b in range(2)
        for i in range(3)
        if labels[b, i + 1] >= 0
    ]
    assert len(expected) == 4
    assert cross_entropy(logits, labels).item() == pytest.approx(sum(expected) / 4, rel=1e-12)


@pytest.mark.parametrize(
    "parts",
    [
        FULL,
        {"experts": {"balance_loss": {"scope": "global"}}, "model": {"activation_checkpointing": True}},
        {"depth": {"selection": "token_choice", "balance_weight": 0.1}},
    ],
    ids=["all terms", "global balance", "token choice"],
)
def test_a_batch_without_rows_has_loss_zero_and_gives_every_parameter_a_zero_gradient(parts):
    """On a rank without rows: it must enter every collective of backward, and change nothing."""
    model = ModeTransformer(make_config(**parts))
    out = model(IDS[:0], labels=IDS[:0])
    assert out.loss.item() == 0 and all(term.item() == 0 for term in out.losses.values())
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_batch_without_any_label_has_loss_zero_and_not_nan():
    assert cross_entropy(torch.randn(2, 4, 5), torch.full((2, 4), -100)).item() == 0


def test_the_total_is_the_weighted_sum_of_the_terms():
    config = make_config(**FULL)
    out = ModeTransformer(config)(IDS, labels=IDS)
    weights = {
        "cross_entropy": 1,
        "expert_balance": config.experts.balance_loss.weight,
        "expert_z": config.experts.z_loss_weight,
        "depth_predictor": config.depth.predictor.weight,
        "depth_aux": config.depth.aux_loss.weight,
    }
    assert set(out.losses) == set(weights)
    assert out.loss.item() == pytest.approx(sum(weights[name] * out.losses[name].item() for name in weights), rel=1e-6)


def test_the_language_model_loss_reaches_every_router_and_everything_but_the_predictors():
    model = ModeTransformer(make_config(**FULL))
    missed = {name for name, _ in model.named_parameters()} - reached(
        model(IDS, labels=IDS).losses["cross_entropy"], model
    )
    assert missed == {name for name, _ in model.named_parameters() if ".predictor." in name}


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh"])
@pytest.mark.parametrize("selection", ["learned", "token_choice"])
def test_the_language_model_loss_reaches_the_depth_router_through_every_gate(gate, selection):
    model = ModeTransformer(make_config(depth={"gate": gate, "selection": selection}))
    assert "blocks.1.router.scorer.weight" in reached(model(IDS, labels=IDS).losses["cross_entropy"], model)


def test_the_predictors_loss_reaches_only_the_predictors():
    model = ModeTransformer(make_config(**FULL))
    names = reached(model(IDS, labels=IDS).losses["depth_predictor"], model)
    assert names == {name for name, _ in model.named_parameters() if ".predictor." in name}


def test_the_auxiliary_loss_reaches_the_router():
    model = ModeTransformer(make_config(**FULL))
    assert "blocks.3.router.scorer.weight" in reached(model(IDS, labels=IDS).losses["depth_aux"], model)


def test_membership_targets_sum_to_c_in_every_row_and_stand_at_the_kept_tokens():
    model = ModeTransformer(make_config(**FULL))
    for record in model(IDS).routing[1::2]:
        targets = record.depth.kept_BL()
        assert targets.sum(dim=1).tolist() == [4, 4, 4]
        for row, kept in zip(targets, record.depth.kept_BS, strict=True):
            assert row.nonzero().flatten().tolist() == kept.tolist()


def bce(logits: torch.Tensor, kept: torch.Tensor) -> float:
    """Binary cross-entropy token by token: kept tokens are the positives."""
    pairs = zip(logits.flatten().tolist(), kept.flatten().tolist(), strict=True)
    return sum(math.log(1 + math.exp(-r if k else r)) for r, k in pairs) / kept.numel()


def test_depth_terms_are_the_binary_cross_entropy_against_membership_as_a_mean_over_blocks():
    out = ModeTransformer(make_config(**FULL))(IDS, labels=IDS)
    routed = [record.depth for record in out.routing if record.depth is not None]
    assert len(routed) == 2
    predictor = sum(bce(depth.predicted_BL, depth.kept_BL()) for depth in routed) / 2
    aux = sum(bce(depth.logits_BL, depth.kept_BL()) for depth in routed) / 2
    assert out.losses["depth_predictor"].item() == pytest.approx(predictor, rel=1e-5)
    assert out.losses["depth_aux"].item() == pytest.approx(aux, rel=1e-5)


def test_the_z_loss_is_the_mean_squared_log_partition_as_a_mean_over_blocks():
    out = ModeTransformer(make_config(**FULL))(IDS, labels=IDS)
    means = []
    for record in out.routing:
        squares = [math.log(sum(map(math.exp, row))) ** 2 for row in record.experts.logits_TJ.tolist()]
        means.append(sum(squares) / len(squares))
    assert out.losses["expert_z"].item() == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_causal_use_has_no_routing_terms():
    """The predictor must not be scored against its own decisions."""
    out = ModeTransformer(make_config(**FULL))(IDS, labels=IDS, causal=True)
    assert set(out.losses) == {"cross_entropy"} and torch.equal(out.loss, out.losses["cross_entropy"])


def test_the_predictor_does_not_change_the_language_model():
    with_predictor = ModeTransformer(make_config(depth={"predictor": {"width": 8}}))(IDS, labels=IDS)
    without = ModeTransformer(make_config(depth={}))(IDS, labels=IDS)
    assert torch.equal(with_predictor.logits, without.logits)
    assert torch.equal(with_predictor.losses["cross_entropy"], without.losses["cross_entropy"])


@pytest.mark.parametrize("seed", range(20))
def test_the_balance_loss_has_its_minimum_one_at_the_targets(seed):
    target = target_shares(num_experts=4, num_no_ops=2, no_op_fraction=0.3)
    assert target.sum().item() == pytest.approx(1)
    assert balance(target, target, target).item() == pytest.approx(1, rel=1e-12)
    generator = torch.Generator().manual_seed(seed)
    other = torch.rand(5, generator=generator, dtype=torch.float64)
    other = other / other.sum()
    assert balance(other, other, target).item() > 1


def routing_with(choices: list[list[int]], scores: list[list[float]], num_experts: int, rows: int = 1) -> ExpertRouting:
    chosen = torch.tensor(choices)
    probabilities = torch.tensor(scores, dtype=torch.float64)
    gates = probabilities.gather(1, chosen)
    shape = (rows, len(choices) // rows)
    return ExpertRouting(num_experts, probabilities.log(), probabilities, chosen, gates, chosen < num_experts, shape)


def test_the_balance_loss_counts_all_no_op_columns_together():
    """Two no-op columns sharing the no-op load are as good as one of them carrying it all."""
    config = make_config(experts={"num_experts": 2, "top_k": 1, "num_no_ops": 2, "no_op_fraction": 0.5})
    shared = routing_with([[0], [1], [2], [3]], [[0.25, 0.25, 0.25, 0.25]] * 4, 2)
    single = routing_with([[0], [1], [3], [3]], [[0.25, 0.25, 0.0, 0.5]] * 4, 2)
    for routing in (shared, single):
        value = expert_balance(config.experts, BalanceLossConfig(), routing)
        assert value.item() == pytest.approx(1, rel=1e-12)


def test_the_balance_loss_moves_when_the_no_op_load_moves():
    config = make_config(experts={"num_experts": 2, "top_k": 1, "num_no_ops": 1, "no_op_fraction": 0.5})
    values = []
    for no_ops in range(5):
        choices = [[2]] * no_ops + [[t % 2] for t in range(4 - no_ops)]
        real = (1 - no_ops / 4) / 2
        routing = routing_with(choices, [[real, real, no_ops / 4]] * 4, 2)
        values.append(expert_balance(config.experts, BalanceLossConfig(), routing).item())
    assert values[2] == min(values) == pytest.approx(1)
    assert values[0] > values[1] > values[2] < values[3] < values[4]


def test_sequence_scope_is_the_mean_over_sequences_and_global_scope_is_over_the_batch():
    config = make_config(experts={"num_experts": 2, "top_k": 1})
    routing = routing_with([[0], [0], [1], [1]], [[0.8, 0.2]] * 2 + [[0.2, 0.8]] * 2, 2, rows=2)
    per_sequence = expert_balance(config.experts, BalanceLossConfig(scope="sequence"), routing)
    whole = expert_balance(config.experts, BalanceLossConfig(scope="global"), routing)
    assert per_sequence.item() == pytest.approx(2 * 0.8)  # each sequence: f = (1, 0), P = (0.8, 0.2)
    assert whole.item() == pytest.approx(1)  # the batch: f = P = (0.5, 0.5)


def test_sequence_scope_losses_do_not_depend_on_the_split_into_micro_batches():
    config = make_config(**FULL)
    model = ModeTransformer(config).double()
    whole = model(IDS, labels=IDS).losses
    parts = [model(IDS[b : b + 1], labels=IDS[b : b + 1]).losses for b in range(3)]
    for name, value in whole.items():
        mean = torch.stack([part[name] for part in parts]).mean()
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-12, msg=name)


def test_the_token_choice_balance_loss_is_one_at_the_target_share():
    config = make_config(depth={"selection": "token_choice", "capacity_fraction": 0.25, "balance_weight": 0.1})
    certain = 50.0
    values = []
    for kept in range(5):
        logits = torch.tensor([[certain] * kept + [-certain] * (4 - kept)])
        record = DepthRouting(logits, torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0), None, None)
        values.append(depth_balance(config.depth, record).item())
    assert values[1] == min(values) == pytest.approx(1)
    assert values[0] > 1 and values[1] < values[2] < values[3] < values[4]
