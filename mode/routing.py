"""The records that routers hand upward. Losses, metrics and plots read these and nothing else.

Nothing here is remembered between steps: a record belongs to one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mode.accounting import BlockCounts
from mode.placement import Placement


@dataclass(frozen=True)
class DepthRouting:
    """Which tokens of every sequence enter a block.

    Choosing the largest logits of a sequence looks at its future: not causal, so for training and
    top-k evaluation only.
    """

    logits_BL: Tensor  # float32: what the tokens were ranked by
    kept_BS: Tensor  # int64, ascending: the slots' tokens
    gates_BS: Tensor  # float32: what multiplies the block's update
    valid_BS: Tensor | None  # bool, False at slots that only fill up a shorter row; None: no fillers
    predicted_BL: Tensor | None  # float32: the predictor's logits of being kept

    def kept_BL(self) -> Tensor:
        """Membership as a mask over the sequence."""
        kept = torch.zeros_like(self.logits_BL, dtype=torch.bool)
        member_BS = torch.ones_like(self.kept_BS, dtype=torch.bool) if self.valid_BS is None else self.valid_BS
        return kept.scatter(1, self.kept_BS, member_BS)


@dataclass(frozen=True)
class ExpertRouting:
    """Which columns every token chose, and which of the choices a real expert processes.

    Columns 0 .. E-1 are real experts, columns E .. J-1 are no-ops.
    """

    num_experts: int
    logits_TJ: Tensor  # float32, without any selection bias
    scores_TJ: Tensor  # float32: softmax of the logits
    choices_TK: Tensor  # int64: distinct columns, best first
    gates_TK: Tensor  # float32: what multiplies an expert's output
    processed_TK: Tensor  # bool: chosen a real expert and not dropped by its capacity

    def choice_counts_J(self) -> Tensor:
        """How often each column was chosen, dropped choices included."""
        return torch.bincount(self.choices_TK.flatten(), minlength=self.scores_TJ.shape[1])

    def processed_counts_E(self) -> Tensor:
        """How many assignments each real expert processes."""
        return torch.bincount(self.choices_TK[self.processed_TK], minlength=self.num_experts)

    def num_processed(self) -> Tensor:
        return self.processed_TK.sum()

    def sum_of_gates(self) -> Tensor:
        """Of the processed choices. Near 0 each, the experts work for nothing."""
        return (self.gates_TK.detach().double() * self.processed_TK).sum()

    def num_no_op(self) -> Tensor:
        return (self.choices_TK >= self.num_experts).sum()

    def num_dropped(self) -> Tensor:
        return ((self.choices_TK < self.num_experts) & ~self.processed_TK).sum()


@dataclass(frozen=True)
class BlockRouting:
    """All that was decided in one block. `None` where the block has no such router."""

    layer: int
    placement: Placement  # of the tokens that entered the block's body
    depth: DepthRouting | None
    experts: ExpertRouting | None

    def counts(self) -> BlockCounts:
        """The routes as numbers for `mode.accounting`. Waits for the device."""
        rows, slots = self.placement.positions_BS.shape
        length, tokens = slots, rows * slots
        if self.depth is not None:
            length, tokens = self.depth.logits_BL.shape[1], int(self.depth.kept_BL().sum())
        if self.experts is None:
            return BlockCounts(rows, length, slots, tokens)
        processed, no_op, dropped = torch.stack(
            [self.experts.num_processed(), self.experts.num_no_op(), self.experts.num_dropped()]
        ).tolist()
        return BlockCounts(rows, length, slots, tokens, processed, no_op, dropped)
