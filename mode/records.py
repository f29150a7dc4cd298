"""What routed layers hand upward, and collecting it from any model. Losses, metrics and plots read records alone.

A record belongs to one forward pass. Nothing is kept on modules, so nothing is counted twice where activation
checkpointing runs forward again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mode.accounting import BlockCounts


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
    present_BL: Tensor | None = None  # bool, False at padding, which is never kept; None: no padding

    def kept_BL(self) -> Tensor:
        """Membership as a mask over the sequence."""
        kept = torch.zeros_like(self.logits_BL, dtype=torch.bool)
        member_BS = torch.ones_like(self.kept_BS, dtype=torch.bool) if self.valid_BS is None else self.valid_BS
        return kept.scatter(1, self.kept_BS, member_BS)

    def num_kept(self) -> Tensor:
        return self.kept_BL().sum()

    def num_tokens(self) -> Tensor:
        """Kept and skipped ones."""
        return torch.ones_like(self.logits_BL).sum() if self.present_BL is None else self.present_BL.sum()

    @property
    def device(self) -> torch.device:
        return self.kept_BS.device


@dataclass(frozen=True)
class ExpertRouting:
    """Which columns every token chose, and which of the choices a real expert processes.

    Columns 0 .. E-1 are real experts, columns E .. J-1 are no-ops. The T tokens lie in rows (sequences) of S slots;
    where `used_BS` is False there is no token.
    """

    num_experts: int
    logits_TJ: Tensor  # float32, without any selection bias
    scores_TJ: Tensor  # float32: softmax of the logits
    choices_TK: Tensor  # int64: distinct columns, best first
    gates_TK: Tensor  # float32: what multiplies an expert's output
    processed_TK: Tensor  # bool: chosen a real expert and not dropped by its capacity
    shape: tuple[int, int]  # (B, S); T = B x S without fillers
    used_BS: Tensor | None = None  # bool; None: no fillers

    def by_sequence(self, x_TX: Tensor) -> Tensor:
        """[B, S, ...]: a value of every token in its place; zeros at fillers."""
        return unflatten(x_TX, self.shape, self.used_BS)

    def choice_counts_J(self) -> Tensor:
        """How often each column was chosen, dropped choices included. Does not wait for the device."""
        counts_J = torch.zeros(self.scores_TJ.shape[1], dtype=torch.int64, device=self.choices_TK.device)
        return counts_J.index_add_(0, self.choices_TK.flatten(), torch.ones_like(self.choices_TK).flatten())

    def processed_counts_E(self) -> Tensor:
        """How many assignments each real expert processes. Does not wait for the device."""
        counts_J = torch.zeros(self.scores_TJ.shape[1], dtype=torch.int64, device=self.choices_TK.device)
        return counts_J.index_add_(0, self.choices_TK.flatten(), self.processed_TK.long().flatten())[: self.num_experts]

    @property
    def device(self) -> torch.device:
        return self.choices_TK.device

    def num_processed(self) -> Tensor:
        return self.processed_TK.sum()

    def sum_of_gates(self) -> Tensor:
        """Of the processed choices. Near 0 each, the experts work for nothing."""
        return (self.gates_TK.detach().double() * self.processed_TK).sum()

    def num_no_op(self) -> Tensor:
        return (self.choices_TK >= self.num_experts).sum()

    def num_dropped(self) -> Tensor:
        return ((self.choices_TK < self.num_experts) & ~self.processed_TK).sum()


def flatten(x_BSX: Tensor, used_BS: Tensor | None) -> Tensor:
    """The tokens of a grid as one list, row after row, without fillers."""
    return x_BSX.flatten(0, 1) if used_BS is None else x_BSX[used_BS]


def unflatten(x_TX: Tensor, shape: tuple[int, int], used_BS: Tensor | None) -> Tensor:
    """The grid again, with zeros at fillers; `flatten`'s inverse."""
    if used_BS is None:
        return x_TX.unflatten(0, shape)
    return x_TX.new_zeros(*used_BS.shape, *x_TX.shape[1:]).index_put((used_BS,), x_TX)


@dataclass(frozen=True)
class BlockRouting:
    """All that was decided in one block of our transformer. `None` where the block has no such router."""

    layer: int
    positions_BS: Tensor  # int64: of the slots that entered the block
    depth: DepthRouting | None
    experts: ExpertRouting | None

    @property
    def valid_BS(self) -> Tensor | None:
        """bool, False at fillers; None: there are none."""
        return None if self.depth is None else self.depth.valid_BS

    def counts(self) -> BlockCounts:
        """The routes as numbers for `mode.accounting`. Waits for the device."""
        rows, slots = self.positions_BS.shape
        length, tokens = slots, rows * slots
        if self.depth is not None:
            length, tokens = self.depth.logits_BL.shape[1], int(self.depth.num_kept())
        if self.experts is None:
            return BlockCounts(rows, length, slots, tokens)
        processed, no_op, dropped = torch.stack(
            [self.experts.num_processed(), self.experts.num_no_op(), self.experts.num_dropped()]
        ).tolist()
        return BlockCounts(rows, length, slots, tokens, processed, no_op, dropped)


# ---- Collecting ----


@dataclass(frozen=True)
class LayerRecord:
    """What one layer decided in one forward pass."""

    name: str  # of the layer within the model
    layer: nn.Module
    routing: ExpertRouting | DepthRouting
    losses: dict[str, Tensor]  # each before its weight; empty in evaluation
    weights: dict[str, float]  # of the losses
    input_shape: tuple[int, ...]  # of the tokens that reached the layer


class RoutingRecords(Sequence[LayerRecord]):
    """The records of one forward pass, in the order of the layers."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._records: list[LayerRecord] = []

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> LayerRecord:  # type: ignore[override]
        return self._records[index]

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter(self._records)

    def name_of(self, layer: nn.Module) -> str | None:
        return self._names.get(id(layer))

    def append(self, record: LayerRecord) -> None:
        self._records.append(record)


_collecting: ContextVar[tuple[RoutingRecords, ...]] = ContextVar("mode_collecting", default=())
# Where the classes are that wrap a model, and what they call it. A user's own attribute `module` is no wrapper.
WRAPPERS = {"deepspeed.": "module", "torch.nn.parallel.": "module", "torch._dynamo.": "_orig_mod"}
_present: ContextVar[Tensor | None] = ContextVar("mode_present", default=None)
# With the number of the backward pass, so that nothing is left over for the next one.
_present_in_backward: ContextVar[tuple[int, Tensor] | None] = ContextVar("mode_present_in_backward", default=None)


@contextmanager
def only_present(valid_BS: Tensor | None) -> Iterator[None]:
    """Tells the expert layers of a depth-routed block which slots hold a token while the block runs."""
    token = _present.set(valid_BS)
    try:
        yield
    finally:
        _present.reset(token)


def only_present_in_backward(valid_BS: Tensor | None, input_BSD: Tensor, output_BSD: Tensor) -> None:
    """Repeats `only_present` while backward is between a block's output and its input.

    There activation checkpointing inside of the block runs it again, outside of the context it first ran in.
    """
    if valid_BS is None or not output_BSD.requires_grad:
        return

    def enter(_: Tensor) -> None:
        _present_in_backward.set((torch._C._current_graph_task_id(), valid_BS))

    def leave(_: Tensor) -> None:
        _present_in_backward.set(None)

    output_BSD.register_hook(enter)
    if input_BSD.requires_grad:
        input_BSD.register_hook(leave)


def present_slots(shape: Sequence[int]) -> Tensor | None:
    """bool [B, S], False at fillers of a depth-routed block around an input of this shape; None: there are none."""
    valid_BS, again = _present.get(), _present_in_backward.get()
    if valid_BS is None and again is not None and again[0] == torch._C._current_graph_task_id():
        valid_BS = again[1]
    return valid_BS if valid_BS is not None and valid_BS.shape == tuple(shape[:2]) else None


@contextmanager
def collect_routing(model: nn.Module) -> Iterator[RoutingRecords]:
    """Collects what every `MoE` and `DepthRouted` of `model` decides while the context lasts: one forward pass.

        with mode.collect_routing(engine) as records:
            loss = engine(batch)
        engine.backward(loss + mode.auxiliary_loss(records))

    `model` may be a DeepSpeed engine. A forward pass that activation checkpointing repeats in backward is not
    collected again. When `records` is dropped, nothing of the pass is kept alive.
    """
    records = RoutingRecords(inner_model(model))
    token = _collecting.set((*_collecting.get(), records))
    try:
        yield records
    finally:
        _collecting.reset(token)


def inner_model(model: nn.Module) -> nn.Module:
    """The user's own module inside DeepSpeed's engine, torch's DistributedDataParallel or torch.compile's module."""
    for home, name in WRAPPERS.items():
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and any(each.__module__.startswith(home) for each in type(model).__mro__):
            return inner_model(inner)
    return model


def is_recomputed() -> bool:
    """Whether this forward pass runs inside of backward, as activation checkpointing does."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch.compiler.disable
def put(
    layer: nn.Module,
    routing: ExpertRouting | DepthRouting,
    losses: dict[str, Tensor],
    weights: dict[str, float],
    input_shape: Sequence[int],
) -> None:
    """Hands a layer's record to whoever collects from a model that contains the layer."""
    collecting = _collecting.get()
    if not collecting or is_recomputed():
        return
    for records in collecting:
        name = records.name_of(layer)
        if name is not None:
            records.append(LayerRecord(name, layer, routing, losses, weights, tuple(input_shape)))


def weighted_sum(losses: dict[str, Tensor], weights: dict[str, float], device: torch.device) -> Tensor:
    """The sum of the losses times their weights; 0 of none."""
    return sum((weights[name] * loss for name, loss in losses.items()), start=torch.zeros((), device=device))


def auxiliary_loss(records: RoutingRecords) -> Tensor:
    """What to add to a model's loss: the weighted losses of all layers that `records` holds, summed.

    It contains what `MoE` returns as `l_aux`: add one of the two, not both.
    """
    if not len(records):
        raise ValueError(
            "the records are empty; run the forward pass inside `with mode.collect_routing(model) as records`, on the "
            "model that holds the MoE and DepthRouted layers"
        )
    terms = [weighted_sum(record.losses, record.weights, record.routing.device) for record in records]
    for record, term in zip(records, terms, strict=True):
        router = record.layer.get_submodule("router")
        learns = any(parameter.requires_grad for parameter in router.parameters())
        if record.losses and learns and torch.is_grad_enabled() and not term.requires_grad:
            raise ValueError(
                f"the auxiliary losses of {record.name or 'the layer'} carry no gradient, as under reentrant "
                "activation checkpointing; use torch.utils.checkpoint with use_reentrant=False (Hugging Face: "
                'gradient_checkpointing_kwargs={"use_reentrant": False})'
            )
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()
