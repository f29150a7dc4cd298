"""The losses of an expert layer, computed from its routing record.

Each is a mean over sequences of a mean over tokens: the same for any number of ranks and any split into micro-batches.
The `global` balance scope is the one exception, and says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from mode.config.settings import BalanceLossConfig, ExpertsConfig
from mode.layers import balance, mean
from mode.records import ExpertRouting


def expert_losses(config: ExpertsConfig, routing: ExpertRouting) -> dict[str, Tensor]:
    """The terms that the configuration asks for, each before its weight."""
    losses = {}
    if config.balance_loss is not None:
        losses["expert_balance"] = expert_balance(config, config.balance_loss, routing)
    if config.z_loss_weight:
        losses["expert_z"] = expert_z(routing)
    return losses


def expert_loss_weights(config: ExpertsConfig) -> dict[str, float]:
    balance_weight = 0.0 if config.balance_loss is None else config.balance_loss.weight
    return {"expert_balance": balance_weight, "expert_z": config.z_loss_weight}


def target_shares(num_experts: int, num_no_ops: int, no_op_fraction: float) -> Tensor:
    """The share of all choices that each group should get: E real experts, then all no-ops together."""
    real = [(1 - no_op_fraction) / num_experts] * num_experts
    return torch.tensor(real + [no_op_fraction] * (num_no_ops > 0), dtype=torch.float64)


def join_no_ops(x_XJ: Tensor, num_experts: int) -> Tensor:
    """Sums the no-op columns into one, because only their common share has a target."""
    if x_XJ.shape[-1] == num_experts:
        return x_XJ
    no_op_X1 = x_XJ[..., num_experts:].sum(dim=-1, keepdim=True)
    return torch.cat([x_XJ[..., :num_experts], no_op_X1], dim=-1)


def expert_balance(experts: ExpertsConfig, loss: BalanceLossConfig, routing: ExpertRouting) -> Tensor:
    """f: shares of the choices, P: mean scores; per sequence, or f over all ranks' tokens."""
    target_J = target_shares(experts.num_experts, experts.num_no_ops, experts.no_op_fraction)
    target_J = target_J.to(routing.scores_TJ)
    chosen_TJ = torch.zeros_like(routing.scores_TJ).scatter(1, routing.choices_TK, 1.0 / experts.top_k)
    chosen_BJ = join_no_ops(routing.by_sequence(chosen_TJ).sum(dim=1), experts.num_experts)
    scores_BJ = join_no_ops(routing.by_sequence(routing.scores_TJ).sum(dim=1), experts.num_experts)
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


def expert_z(routing: ExpertRouting) -> Tensor:
    """Squared log-partition of the router: keeps its logits from drifting away."""
    squared_TZ = torch.stack(
        [routing.logits_TJ.logsumexp(dim=-1).square(), torch.ones_like(routing.logits_TJ[:, 0])], 1
    )
    summed_B, tokens_B = routing.by_sequence(squared_TZ).sum(dim=1).unbind(dim=1)
    return mean(summed_B / tokens_B.clamp(min=1))
