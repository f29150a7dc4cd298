"""Bringing tokens to experts and their outputs back, on one rank.

Two methods joined by a record, with the experts between them. No-op and dropped choices are left out before
anything is sorted or copied; nothing is padded. Knows neither how choices were made nor what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mode.ops.rows import Rows, gather_rows, sort_by_expert, sum_rows
from mode.records import ExpertRouting


@dataclass(frozen=True)
class Dispatched:
    """What the experts of this rank get, sorted by expert. A dispatcher adds what it needs for the way back."""

    x_QD: Tensor  # the tokens' vectors
    counts_e: Tensor  # int64: how many rows belong to each expert of this rank


@dataclass(frozen=True)
class Sorted(Dispatched):
    """The processed assignments, sorted by expert; within one expert, by token."""

    gates_R: Tensor  # float32
    rows: Rows


class LocalDispatcher:
    """All experts are on this rank.

    Where `all_processed`, without no-ops and capacity, there are T x K rows, and nothing waits for the device.
    Otherwise it must be asked how many there are.
    """

    def __init__(self, all_processed: bool = False) -> None:
        self.all_processed = all_processed

    def dispatch(self, x_TD: Tensor, routing: ExpertRouting) -> Dispatched:
        return self.sort(x_TD, routing)

    def sort(self, x_TD: Tensor, routing: ExpertRouting) -> Sorted:
        processed_TK = None if self.all_processed else routing.processed_TK
        rows = sort_by_expert(routing.choices_TK, processed_TK, routing.num_experts)
        gates_R = routing.gates_TK.flatten().index_select(0, rows.assignments_R)
        return Sorted(x_QD=gather_rows(x_TD, rows), counts_e=rows.counts_E, gates_R=gates_R, rows=rows)

    def combine(self, out_QD: Tensor, sent: Dispatched) -> Tensor:
        """Sums each token's gated expert outputs; a token without any gets exactly zero."""
        assert isinstance(sent, Sorted)
        return sum_rows(out_QD, sent.gates_R, sent.rows)
