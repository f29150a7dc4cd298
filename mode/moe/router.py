"""The expert router: softmax over E real and Z no-op columns, top-K distinct columns per token.

Integrated MoDE lives here: a no-op is one more column, chosen on purpose, that owns nothing but its
row of the router. Knows nothing of how the chosen experts are reached or computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mode.accounting import expert_capacity
from mode.config import BalanceBiasConfig, ExpertsConfig
from mode.layers import Scorer
from mode.native import functions as native
from mode.routing import ExpertRouting


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


def largest_columns(logits_TJ: Tensor, top_k: int) -> Tensor:
    """The K largest columns of each token, best first; of equals, the lower column.

    By repeated argmax, because `topk` leaves open which of equal values it takes. For few choices
    it is also the faster of the two.
    """
    choices = [logits_TJ.max(dim=-1, keepdim=True).indices]
    for _ in range(top_k - 1):
        logits_TJ = logits_TJ.scatter(1, choices[-1], float("-inf"))
        choices.append(logits_TJ.max(dim=-1, keepdim=True).indices)
    return torch.cat(choices, dim=-1)


def within_capacity(choices_TK: Tensor, gates_TK: Tensor, num_columns: int, capacity: int) -> Tensor:
    """True where a choice is among its column's `capacity` largest gates; of equals, the earlier token."""
    by_gate_A = gates_TK.flatten().sort(descending=True, stable=True).indices
    by_column_A = choices_TK.flatten()[by_gate_A].sort(stable=True)
    order_A = by_gate_A[by_column_A.indices]  # column by column, within one by falling gate
    counts_J = torch.bincount(by_column_A.values, minlength=num_columns)
    starts_J = counts_J.cumsum(0) - counts_J
    place_A = torch.arange(len(order_A), device=order_A.device) - starts_J[by_column_A.values]
    inside_A = torch.empty_like(order_A, dtype=torch.bool).scatter(0, order_A, place_A < capacity)
    return inside_A.view_as(choices_TK)


class ExpertScorer(Scorer):
    """The logits of every token, and what follows from them alone."""

    def forward(self, x_TD: Tensor, bias_J: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(x, to go on with; logits [T, J]; their softmax; the columns largest with the bias [T, K]; their scores)."""
        if native.takes(x_TD, self.weight):
            return native.route(x_TD, self.weight, bias_J, top_k)
        logits_TJ = self.logits(x_TD)
        scores_TJ = logits_TJ.softmax(dim=-1)
        ranked_TJ = logits_TJ.detach() if bias_J is None else logits_TJ.detach() + bias_J
        choices_TK = largest_columns(ranked_TJ, top_k)
        return x_TD, logits_TJ, scores_TJ, choices_TK, scores_TJ.gather(1, choices_TK)


class ExpertRouter(nn.Module):
    """Chooses by the logits alone."""

    bias_J: Tensor | None

    def __init__(self, config: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("bias_J", None)
        self.scorer = ExpertScorer(width, config.num_columns)
        self.to_gates: Callable[[Tensor], Tensor] = _share_of_choices if config.renormalize else _as_they_are
        self.limit: Callable[[Tensor, Tensor, Tensor], Tensor] = (
            _no_limit if config.capacity_factor is None else self._limit
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, ExpertRouting]:
        """(x, to go on with; the routing of every token)."""
        x_TD, logits_TJ, scores_TJ, choices_TK, chosen_TK = self.scorer(x_TD, self.bias_J, self.config.top_k)
        gates_TK = self.to_gates(chosen_TK)
        processed_TK = choices_TK < self.config.num_experts
        if self.training:  # evaluation and sampling drop nothing
            processed_TK = self.limit(processed_TK, choices_TK, gates_TK)
        routing = ExpertRouting(self.config.num_experts, logits_TJ, scores_TJ, choices_TK, gates_TK, processed_TK)
        return x_TD, routing

    def _limit(self, processed_TK: Tensor, choices_TK: Tensor, gates_TK: Tensor) -> Tensor:
        config = self.config
        assert config.capacity_factor is not None
        capacity = expert_capacity(
            config.capacity_factor, config.top_k, len(choices_TK), config.no_op_fraction, config.num_experts
        )
        return processed_TK & within_capacity(choices_TK, gates_TK, config.num_columns, capacity)


def _as_they_are(gates_TK: Tensor) -> Tensor:
    return gates_TK


def _share_of_choices(gates_TK: Tensor) -> Tensor:
    return gates_TK / gates_TK.sum(dim=-1, keepdim=True)


def _no_limit(processed_TK: Tensor, choices_TK: Tensor, gates_TK: Tensor) -> Tensor:
    return processed_TK


class BiasedExpertRouter(ExpertRouter):
    """Adds a bias to the logits for the selection only; gates and gradients never see it.

    The bias is state, saved in checkpoints. It moves when the trainer says so, once per optimizer
    step, never in forward.
    """

    bias_J: Tensor

    def __init__(self, config: ExpertsConfig, balance: BalanceBiasConfig, width: int) -> None:
        super().__init__(config, width)
        self.rate = balance.rate
        self.register_buffer("bias_J", torch.zeros(config.num_columns, dtype=torch.float32))

    @torch.no_grad()
    def move_bias(self, counts_J: Tensor) -> None:
        """Moves each column toward its target share, given how often the global batch chose it.

        By the relative error, at most `rate`: a column with none rises and one with twice its share
        falls by the full rate, and the steps shrink near the target instead of oscillating.
        """
        config = self.config
        counts = join_no_ops(counts_J.double(), config.num_experts)
        target = target_shares(config.num_experts, config.num_no_ops, config.no_op_fraction).to(counts.device)
        share = counts / counts.sum().clamp(min=1)
        error = (1 - share / target).clamp(-1, 1)
        step_J = torch.cat([error[: config.num_experts], error[config.num_experts :].expand(config.num_no_ops)])
        self.bias_J += (self.rate * step_J).to(self.bias_J.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BiasedExpertRouter:
        """Moves with the module but stays float32: in bfloat16 the small steps of the bias would be lost."""
        bias_J = self.bias_J
        super()._apply(fn, recurse)
        self.bias_J = bias_J.to(self.bias_J.device)
        return self


def build_expert_router(config: ExpertsConfig, width: int) -> ExpertRouter:
    if config.balance_bias is None:
        return ExpertRouter(config, width)
    return BiasedExpertRouter(config, config.balance_bias, width)
