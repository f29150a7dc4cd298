"""The expert router: softmax over E real and Z no-op columns, top-K distinct columns per token.

Integrated MoDE lives here: a no-op is one more column, chosen on purpose, that owns nothing but its
row of the router. Knows nothing of how the chosen experts are reached or computed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mode.accounting import expert_capacity
from mode.config.settings import ExpertsConfig
from mode.layers import Initial, Scorer
from mode.moe.losses import join_no_ops, target_shares
from mode.ops import route
from mode.records import ExpertRouting

PASSES_BEFORE_A_WARNING = 1000  # training passes without a move of the bias; more than anyone accumulates


def within_capacity(choices_TK: Tensor, gates_TK: Tensor, num_columns: int, capacity: int) -> Tensor:
    """True where a choice is among its column's `capacity` largest gates; of equals, the earlier token."""
    by_gate_A = gates_TK.flatten().sort(descending=True, stable=True).indices
    by_column_A = choices_TK.flatten()[by_gate_A].sort(stable=True)
    order_A = by_gate_A[by_column_A.indices]  # column by column, within one by falling gate
    columns_J = torch.arange(num_columns, device=order_A.device)
    starts_J = torch.searchsorted(by_column_A.values, columns_J)  # `bincount` would wait for the device
    place_A = torch.arange(len(order_A), device=order_A.device) - starts_J[by_column_A.values]
    inside_A = torch.empty_like(order_A, dtype=torch.bool).scatter(0, order_A, place_A < capacity)
    return inside_A.view_as(choices_TK)


class ExpertScorer(Scorer):
    """The logits of every token, and what follows from them alone."""

    def forward(self, x_TD: Tensor, bias_J: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logits [T, J], their softmax, the K columns largest with the bias [T, K], the scores of those)."""
        return route(x_TD, self.weight, bias_J, top_k)


class ExpertRouter(nn.Module):
    """Chooses K columns for every token by its logits, plus a selection bias where `balance_bias` is set.

    The bias changes the selection only; gates and gradients never see it. It is state, saved in checkpoints. It moves
    once per optimizer step (`mode.after_step`), never in forward.
    """

    bias_J: Tensor | None

    def __init__(self, config: ExpertsConfig, width: int, initial: Initial) -> None:
        super().__init__()
        self.config = config
        bias_J = None if config.balance_bias is None else torch.zeros(config.num_columns, dtype=torch.float32)
        self.register_buffer("bias_J", bias_J)
        self.scorer = ExpertScorer(width, config.num_columns, initial.part("scorer"))
        self.passes_since_move = 0  # for a warning alone

    def forward(self, x_TD: Tensor, shape: tuple[int, int], used_BS: Tensor | None = None) -> ExpertRouting:
        """Routes tokens that lie in a grid of this shape (B, S); `used_BS` tells which slots hold one."""
        config = self.config
        logits_TJ, scores_TJ, choices_TK, gates_TK = self.scorer(x_TD, self.bias_J, config.top_k)
        if config.renormalize:
            gates_TK = gates_TK / gates_TK.sum(dim=-1, keepdim=True)
        processed_TK = choices_TK < config.num_experts
        if self.training and config.capacity_factor is not None:  # evaluation and sampling drop nothing
            processed_TK = processed_TK & self._within_capacity(choices_TK, gates_TK)
        if self.training and self.bias_J is not None:
            self._count_pass()
        return ExpertRouting(
            config.num_experts, logits_TJ, scores_TJ, choices_TK, gates_TK, processed_TK, shape, used_BS
        )

    def _within_capacity(self, choices_TK: Tensor, gates_TK: Tensor) -> Tensor:
        config = self.config
        assert config.capacity_factor is not None
        capacity = expert_capacity(
            config.capacity_factor, config.top_k, len(choices_TK), config.no_op_fraction, config.num_experts
        )
        return within_capacity(choices_TK, gates_TK, config.num_columns, capacity)

    @torch.compiler.disable  # a compiled forward pass would be compiled again for every number
    def _count_pass(self) -> None:
        self.passes_since_move += 1
        if self.passes_since_move == PASSES_BEFORE_A_WARNING:
            warnings.warn(
                f"balance_bias is set, but in {PASSES_BEFORE_A_WARNING} training passes the selection bias was never "
                "moved, so nothing balances the experts: call mode.after_step(model, records) after every optimizer "
                "step",
                stacklevel=2,
            )

    @torch.no_grad()
    def move_bias(self, counts_J: Tensor) -> None:
        """Moves each column toward its target share, given how often the global batch chose it.

        By the relative error, at most `rate`: a column with none rises and one with twice its share
        falls by the full rate, and the steps shrink near the target instead of oscillating.
        """
        config = self.config
        assert config.balance_bias is not None and self.bias_J is not None
        counts = join_no_ops(counts_J.double(), config.num_experts)
        target = target_shares(config.num_experts, config.num_no_ops, config.no_op_fraction).to(counts.device)
        share = counts / counts.sum().clamp(min=1)
        error = (1 - share / target).clamp(-1, 1)
        step_J = torch.cat([error[: config.num_experts], error[config.num_experts :].expand(config.num_no_ops)])
        self.bias_J += (config.balance_bias.rate * step_J).to(self.bias_J.dtype)
        self.passes_since_move = 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertRouter:
        """Moves with the module but stays float32: in bfloat16 the small steps of the bias would be lost."""
        bias_J = self.bias_J
        super()._apply(fn, recurse)
        if bias_J is not None and self.bias_J is not None and self.bias_J.dtype != torch.float32:
            moved = self.bias_J.device
            self.bias_J = torch.empty_like(bias_J, device=moved) if bias_J.is_meta else bias_J.to(moved)
        return self
