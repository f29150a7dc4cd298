"""The losses, computed from logits and routing records.

Every routing term is a mean over sequences of a mean over tokens, then a mean over blocks: the same
for any number of ranks and any split into micro-batches. The `global` balance scope is the one
exception, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from mode.config import BalanceLossConfig, DepthConfig, ExpertsConfig, ModeConfig
from mode.layers import at_least_float32
from mode.moe.router import join_no_ops, target_shares
from mode.native import functions as native
from mode.placement import Placement
from mode.routing import BlockRouting, DepthRouting, ExpertRouting

NO_LABEL = -100  # a position that nothing is asked of


def compute_losses(
    config: ModeConfig, logits_BLV: Tensor, labels_BL: Tensor, routing: Sequence[BlockRouting]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the weighted total, each term before its weight)."""
    terms = {"cross_entropy": cross_entropy(logits_BLV, labels_BL)}
    weights = {"cross_entropy": 1.0}
    for name, weight, values in _routing_terms(config, routing):
        terms[name] = torch.stack(list(values)).mean()  # over blocks
        weights[name] = weight
    total = sum((weights[name] * terms[name] for name in terms), start=torch.zeros((), device=logits_BLV.device))
    return total, terms


def _routing_terms(
    config: ModeConfig, routing: Sequence[BlockRouting]
) -> Iterable[tuple[str, float, Iterable[Tensor]]]:
    """(name, weight, one value per block) of every term the configuration asks for."""
    if not routing:
        return
    experts, depth = config.experts, config.depth
    chosen = [(block.placement, block.experts) for block in routing if block.experts is not None]
    kept = [block.depth for block in routing if block.depth is not None]
    if experts is not None and experts.balance_loss is not None:
        yield (
            "expert_balance",
            experts.balance_loss.weight,
            (expert_balance(experts, experts.balance_loss, placement, record) for placement, record in chosen),
        )
    if experts is not None and experts.z_loss_weight:
        yield "expert_z", experts.z_loss_weight, (expert_z(placement, record) for placement, record in chosen)
    if depth is not None and depth.predictor is not None:
        yield "depth_predictor", depth.predictor.weight, (depth_predictor(record) for record in kept)
    if depth is not None and depth.aux_loss is not None:
        yield "depth_aux", depth.aux_loss.weight, (depth_aux(record) for record in kept)
    if depth is not None and depth.balance_weight:
        yield "depth_balance", depth.balance_weight, (depth_balance(depth, record) for record in kept)


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean over the labelled positions; position i is scored on label i + 1."""
    num_labelled = (labels_BL[:, 1:] != NO_LABEL).sum()
    return token_losses(logits_BLV, labels_BL).sum() / num_labelled.clamp(min=1)


def token_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """[B, L - 1]: the loss of each prediction; 0 where there is no label.

    The labels are shifted, not the logits: a slice of the logits would be copied.
    """
    targets_T = F.pad(labels_BL[:, 1:], (0, 1), value=NO_LABEL).flatten()
    logits_TV = at_least_float32(logits_BLV).flatten(0, 1)
    if native.takes(logits_TV):
        losses_T = native.cross_entropy(logits_TV, targets_T, NO_LABEL)
    else:
        losses_T = F.cross_entropy(logits_TV, targets_T, ignore_index=NO_LABEL, reduction="none")
    return losses_T.view_as(labels_BL)[:, :-1]


def mean(values: Tensor) -> Tensor:
    """0 of nothing, connected to the model all the same: a rank without rows still enters backward's collectives."""
    return values.mean() if values.numel() else values.sum()


def balance(share_XJ: Tensor, score_XJ: Tensor, target_J: Tensor) -> Tensor:
    """sum_j f_j P_j / t_j. With f = P it is smallest, 1, where both are the targets."""
    return (share_XJ * score_XJ / target_J).sum(dim=-1)


def expert_balance(
    experts: ExpertsConfig, loss: BalanceLossConfig, placement: Placement, routing: ExpertRouting
) -> Tensor:
    """f: shares of the choices, P: mean scores; per sequence, or f over all ranks' tokens."""
    target_J = target_shares(experts.num_experts, experts.num_no_ops, experts.no_op_fraction)
    target_J = target_J.to(routing.scores_TJ)
    chosen_TJ = torch.zeros_like(routing.scores_TJ).scatter(1, routing.choices_TK, 1.0 / experts.top_k)
    chosen_BJ = join_no_ops(placement.unflatten(chosen_TJ).sum(dim=1), experts.num_experts)
    scores_BJ = join_no_ops(placement.unflatten(routing.scores_TJ).sum(dim=1), experts.num_experts)
    if loss.scope == "sequence":
        tokens_B1 = chosen_BJ.sum(dim=1, keepdim=True).clamp(min=1)  # a sequence without tokens adds nothing
        return mean(balance(chosen_BJ / tokens_B1, scores_BJ / tokens_B1, target_J))
    chosen_J, scores_J = chosen_BJ.sum(dim=0), scores_BJ.sum(dim=0)
    num_ranks = 1
    if distributed.is_available() and distributed.is_initialized():
        num_ranks = distributed.get_world_size()
        distributed.all_reduce(chosen_J)
    tokens = chosen_J.sum().clamp(min=1)
    # The mean over ranks of this is f P of the global batch; its gradient, too, once gradients are averaged.
    return balance(chosen_J / tokens, scores_J * num_ranks / tokens, target_J)


def expert_z(placement: Placement, routing: ExpertRouting) -> Tensor:
    """Squared log-partition of the router: keeps its logits from drifting away."""
    squared_TZ = torch.stack(
        [routing.logits_TJ.logsumexp(dim=-1).square(), torch.ones_like(routing.logits_TJ[:, 0])], 1
    )
    summed_B, tokens_B = placement.unflatten(squared_TZ).sum(dim=1).unbind(dim=1)
    return mean(summed_B / tokens_B.clamp(min=1))


def depth_predictor(routing: DepthRouting) -> Tensor:
    """How badly the predictor foretells top-k membership."""
    assert routing.predicted_BL is not None
    return _membership_loss(routing.predicted_BL, routing)


def depth_aux(routing: DepthRouting) -> Tensor:
    """Pushes the router's own logits above 0 for kept tokens and below 0 for the rest."""
    return _membership_loss(routing.logits_BL, routing)


def _membership_loss(logits_BL: Tensor, routing: DepthRouting) -> Tensor:
    kept_BL = routing.kept_BL().to(logits_BL.dtype)
    return F.binary_cross_entropy_with_logits(logits_BL, kept_BL, reduction="mean" if kept_BL.numel() else "sum")


def depth_balance(depth: DepthConfig, routing: DepthRouting) -> Tensor:
    """Token choice: the balance loss over the two paths, block and residual."""
    kept_BL2 = torch.stack([routing.logits_BL > 0, routing.logits_BL <= 0], dim=-1).to(routing.logits_BL.dtype)
    score_BL2 = torch.stack([torch.sigmoid(routing.logits_BL), torch.sigmoid(-routing.logits_BL)], dim=-1)
    target_2 = torch.tensor([depth.capacity_fraction, 1 - depth.capacity_fraction]).to(score_BL2)
    return mean(balance(kept_BL2.mean(dim=1), score_BL2.mean(dim=1), target_2))
