"""The losses of a depth router, computed from its record: means over the tokens of all sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mode.config.settings import DepthConfig
from mode.layers import balance, mean
from mode.records import DepthRouting


def depth_losses(config: DepthConfig, routing: DepthRouting) -> dict[str, Tensor]:
    """The terms that the configuration asks for, each before its weight."""
    losses = {}
    if config.predictor is not None:
        losses["depth_predictor"] = depth_predictor(routing)
    if config.aux_loss is not None:
        losses["depth_aux"] = depth_aux(routing)
    if config.balance_weight:
        losses["depth_balance"] = depth_balance(config, routing)
    return losses


def depth_loss_weights(config: DepthConfig) -> dict[str, float]:
    return {
        "depth_predictor": 0.0 if config.predictor is None else config.predictor.weight,
        "depth_aux": 0.0 if config.aux_loss is None else config.aux_loss.weight,
        "depth_balance": config.balance_weight,
    }


def depth_predictor(routing: DepthRouting) -> Tensor:
    """How badly the predictor tells beforehand which tokens top-k keeps."""
    assert routing.predicted_BL is not None
    return _membership_loss(routing.predicted_BL, routing)


def depth_aux(routing: DepthRouting) -> Tensor:
    """Pushes the router's own logits above 0 for kept tokens and below 0 for the rest."""
    return _membership_loss(routing.logits_BL, routing)


def _membership_loss(logits_BL: Tensor, routing: DepthRouting) -> Tensor:
    kept_BL = routing.kept_BL().to(logits_BL.dtype)
    if routing.present_BL is None:
        return mean(F.binary_cross_entropy_with_logits(logits_BL, kept_BL, reduction="none"))
    losses_BL = F.binary_cross_entropy_with_logits(logits_BL, kept_BL, weight=routing.present_BL, reduction="sum")
    return losses_BL / routing.present_BL.sum().clamp(min=1)


def depth_balance(depth: DepthConfig, routing: DepthRouting) -> Tensor:
    """Token choice: the balance loss over the two paths, block and residual."""
    kept_BL2 = torch.stack([routing.logits_BL > 0, routing.logits_BL <= 0], dim=-1).to(routing.logits_BL.dtype)
    score_BL2 = torch.stack([torch.sigmoid(routing.logits_BL), torch.sigmoid(-routing.logits_BL)], dim=-1)
    target_2 = torch.tensor([depth.capacity_fraction, 1 - depth.capacity_fraction]).to(score_BL2)
    if routing.present_BL is None:
        return mean(balance(kept_BL2.mean(dim=1), score_BL2.mean(dim=1), target_2))
    present_BL1 = routing.present_BL.unsqueeze(-1).to(score_BL2.dtype)
    tokens_B1 = present_BL1.sum(dim=1).clamp(min=1)
    kept_B2, score_B2 = ((x_BL2 * present_BL1).sum(dim=1) / tokens_B1 for x_BL2 in (kept_BL2, score_BL2))
    return mean(balance(kept_B2, score_B2, target_2))
