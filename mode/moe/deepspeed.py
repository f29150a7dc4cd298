"""The expert layer as the DeepSpeed engine knows it, with its experts spread over ranks.

The one file that knows DeepSpeed's MoE internals. The engine recognises expert layers by class, so ours is
a subclass of DeepSpeed's AutoEP layer: that gives expert gradients their own reduction group, ZeRO its
partitions and checkpoints their per-expert files. Code, parameter names and results are those of the plain
layer.

The path of a token over W expert-parallel ranks:

1. its real choices are sorted by expert, which is by rank, as experts are placed in order (`LocalDispatcher`);
2. the ranks tell each other how many rows they send to every expert;
3. one uneven all-to-all carries exactly those rows: no no-op, no dropped choice, no padding;
4. what arrived, sorted by sender, is sorted by expert; the experts compute; and all of it runs backwards.

A rank with nothing to send or to receive takes part all the same: the all-to-all is a collective.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.autoep_affine import (
    autoep_experts_for_rank,
    autoep_placement_to_affine_map,
    legacy_uniform_autoep_placement_descriptor,
)
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AUTOEP_EXPERT_PLACEMENT,
    AUTOEP_PARAM_EP_RANK,
    AUTOEP_PARAM_LOCAL_EXPERTS,
    AUTOEP_PARAM_LOGICAL_SHAPE,
    DS_AUTOEP_UC_META,
)
from deepspeed.module_inject.auto_ep_comm import COMM_BACKEND
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, _AllToAllV, _split_plan_from_expert_counts
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups
from torch import Tensor, distributed, nn

from mode.config.section import ConfigError
from mode.layers import Initial
from mode.moe.dispatch import Dispatched, LocalDispatcher, Sorted
from mode.moe.experts import ModuleExperts, StackedExperts, processes_all
from mode.moe.layer import LocalMoE
from mode.ops.rows import inverse, permute
from mode.records import ExpertRouting


@dataclass(frozen=True)
class Exchanged(Sorted):
    """What this rank's experts get from all ranks, and the way back.

    `x_QD` and `counts_e` are of this rank's experts; the other inherited fields are of what it sent.
    """

    sent_splits: list[int]  # rows sent to each rank
    received_splits: list[int]  # rows received from each rank
    order_Q: Tensor  # int64: the arrivals, which come by sender, in the order of the experts


class ParallelDispatcher(LocalDispatcher):
    """The experts are spread over the ranks of `group`, in order, as many on each."""

    def __init__(self, group: distributed.ProcessGroup, all_processed: bool) -> None:
        super().__init__(all_processed)
        self.group = group
        self.num_ranks = distributed.get_world_size(group)

    def dispatch(self, x_TD: Tensor, routing: ExpertRouting) -> Exchanged:
        sent = self.sort(x_TD, routing)
        num_local = routing.num_experts // self.num_ranks
        plan = _split_plan_from_expert_counts(sent.counts_e, self.num_ranks, num_local, self.group)
        arrived_QD = _AllToAllV.apply(self.group, sent.x_QD, plan.input_splits, plan.output_splits)
        counts_We = plan.local_counts_by_source
        order_Q = expert_order(counts_We, sum(plan.output_splits))
        return Exchanged(
            x_QD=permute(arrived_QD, order_Q),
            counts_e=counts_We.sum(dim=0),
            gates_R=sent.gates_R,
            rows=sent.rows,
            sent_splits=plan.input_splits,
            received_splits=plan.output_splits,
            order_Q=order_Q,
        )

    def __reduce__(self) -> tuple[type[LocalDispatcher], tuple[bool]]:
        """A copy is not connected to other ranks."""
        return LocalDispatcher, (self.all_processed,)

    def combine(self, out_QD: Tensor, sent: Dispatched) -> Tensor:
        assert isinstance(sent, Exchanged)
        by_sender_QD = permute(out_QD, inverse(sent.order_Q))
        out_RD = _AllToAllV.apply(self.group, by_sender_QD, sent.received_splits, sent.sent_splits)
        return super().combine(out_RD, sent)


def expert_order(counts_We: Tensor, num_rows: int) -> Tensor:
    """The places, in the order of the experts, of rows that come by sender and, of one sender, by expert."""
    num_ranks, num_local = counts_We.shape
    experts_We = torch.arange(num_local, device=counts_We.device).repeat(num_ranks)
    experts_Q = experts_We.repeat_interleave(counts_We.flatten(), output_size=num_rows)
    return experts_Q.argsort(stable=True)


class MoE(LocalMoE, AutoEPMoELayer):
    """`LocalMoE` for DeepSpeed's engine: of its experts this rank holds its share of `ep_size` ranks.

    `deepspeed.initialize` finds it by its class and connects the ranks. Before that, with `ep_size` above 1, the layer
    can be built, saved and loaded but not called.
    """

    def __init__(self, hidden_size: int, *arguments: Any, **settings: Any) -> None:
        LocalMoE.__init__(self, hidden_size, *arguments, **settings)
        self._mark_parameters()

    def _build_experts(
        self, expert: nn.Module | None, initial: Initial, output_scale: float, *_: Any, **__: Any
    ) -> StackedExperts | ModuleExperts:
        rank, world_size = place()
        ep_size = self.config.ep_size
        if world_size % ep_size:
            raise ConfigError("ep_size", f"is {ep_size}, which does not divide the {world_size} ranks; use a divisor")
        self._set_attributes_the_engine_reads(rank % ep_size)
        divided = [] if expert is None else [p for p in expert.parameters() if hasattr(p, "ds_id")]  # by zero.Init
        with partition_parameters.GatheredParameters(divided):
            return super()._build_experts(
                expert, initial, output_scale, ep_size, self.ep_rank, self._mark_for_zero_init
            )

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False, **rest: Any) -> None:
        """Called by the engine when its process groups exist."""
        AutoEPMoELayer.set_deepspeed_parallelism(self, use_data_before_expert_parallel_, **rest)
        if distributed.get_rank(self.ep_group) != self.ep_rank:
            raise ConfigError(
                "use_data_before_expert_parallelism",
                "is true; consecutive ranks must form an expert-parallel group: leave it out",
            )
        if self.ep_size > 1:
            self.experts.dispatcher = ParallelDispatcher(self.ep_group, processes_all(self.config))
        self._mark_parameters()  # again: copy.deepcopy and load_state_dict(assign=True) make parameters without marks
        refuse_what_this_engine_gets_wrong(self)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if self.ep_size > 1 and self.ep_group is None:
            raise RuntimeError(
                f"this MoE holds {self.num_local_experts} of {self.num_experts} experts (ep_size={self.ep_size}) and "
                "is not connected to the other ranks; call deepspeed.initialize or mode.initialize on the model first"
            )
        return LocalMoE.forward(self, hidden_states, used_token)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which are not connected to other ranks until an engine is built around them."""
        return {**self.__dict__, "ep_group": None}

    def _set_attributes_the_engine_reads(self, ep_rank: int) -> None:
        config = self.config
        self.ep_size, self.ep_rank = config.ep_size, ep_rank
        self.ep_group_name = f"ep_size_{config.ep_size}"
        self.ep_group: Any = None  # set by set_deepspeed_parallelism
        self.num_experts = config.num_experts
        self.num_local_experts = config.num_experts // config.ep_size
        self.top_k = config.top_k
        self.expert_placement_descriptor = legacy_uniform_autoep_placement_descriptor(
            self.num_experts, self.num_local_experts, self.ep_size
        )
        self.folding_group_handles = None
        self.tp_group = None
        self.comm_backend = COMM_BACKEND
        self.combine_impl = "weighted_sum"

    def _mark_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.ds_zero_placement_family = "replicated"  # type: ignore[attr-defined]
        for parameter in self.experts.parameters():
            logical_shape = [self.num_experts, *parameter.shape[1:]]
            placement = self.expert_placement_descriptor
            marks = {
                "allreduce": False,
                "group_name": self.ep_group_name,
                "ds_zero_placement_family": "autoep_expert",
                "ds_zero_partition_group_name": self.ep_group_name,
                DS_AUTOEP_UC_META: {
                    AUTOEP_EXPERT_PLACEMENT: placement,
                    AFFINE_MAP: autoep_placement_to_affine_map(placement, logical_shape).to_dict(),
                    AUTOEP_PARAM_LOGICAL_SHAPE: logical_shape,
                    AUTOEP_PARAM_EP_RANK: self.ep_rank,
                    AUTOEP_PARAM_LOCAL_EXPERTS: list(autoep_experts_for_rank(placement, self.ep_rank)),
                },
            }
            for name, value in marks.items():
                setattr(parameter, name, value)

    def _mark_for_zero_init(self, parameter: nn.Parameter) -> None:
        """Tells `zero.Init`, which partitions a parameter as it is made, which ranks hold the same experts."""
        if partition_parameters.zero_init_context:
            if self.ep_group_name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(self.ep_size)
            parameter.ds_zero_partition_process_group = groups._get_expert_data_parallel_group(  # type: ignore[attr-defined]
                self.ep_group_name
            )


def place() -> tuple[int, int]:
    """(rank, number of ranks), from the launcher's variables where the process group does not exist yet."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def refuse_what_this_engine_gets_wrong(layer: MoE) -> None:
    """Refuses an engine, built without `mode.initialize`, that would compute something else without a word."""
    engine = _engine_under_construction()
    if engine is None or _inside.get():
        return
    if engine.zero_optimization_stage() == 0 and layer.ep_size > 1 and engine.gradient_clipping() > 0:
        raise ConfigError(
            "gradient_clipping",
            f"is {engine.gradient_clipping():g} at ZeRO stage 0 with ep_size={layer.ep_size}, where DeepSpeed clips by "
            "a wrong norm; call mode.initialize instead of deepspeed.initialize, use stage 1, or set it to 0",
        )
    if engine.load_universal_checkpoint() and (engine.zero_optimization_stage() == 3 or layer.config.balance_bias):
        at_3 = engine.zero_optimization_stage() == 3
        lost = "a wrong optimizer step at ZeRO stage 3" if at_3 else "no selection bias"
        raise ConfigError(
            "checkpoint.load_universal",
            f"is true, but DeepSpeed restores {lost}; call mode.initialize instead of deepspeed.initialize, and "
            "mode.load_universal to load",
        )


def _engine_under_construction() -> Any:
    """The engine that calls `set_deepspeed_parallelism`, which it does not pass along; None outside of one."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, DeepSpeedEngine):
            return caller
        frame = frame.f_back
    return None


_inside: ContextVar[bool] = ContextVar("mode_initialize", default=False)


@contextmanager
def by_mode_initialize() -> Iterator[None]:
    """While an engine is built by `mode.initialize`, which is right where the refusals above apply."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the reduced gradients to a norm of at most `max_norm` (0: no limit) and returns their norm.

    Every expert counts once, whichever rank has it. For stage 0 only: there DeepSpeed itself averages the
    ranks' norms, which are not the same under expert parallelism, or leaves the experts out.
    """
    groups = [module.ep_group for module in model.modules() if isinstance(module, MoE)]
    gradients = [(is_moe_param(p), p.grad) for p in model.parameters() if p.grad is not None]
    squares = [torch.zeros((), device=next(model.parameters()).device) for _ in range(2)]
    for is_expert, gradient in gradients:
        squares[is_expert] += gradient.float().pow(2).sum()
    if groups:
        distributed.all_reduce(squares[True], group=groups[0])
    norm = (squares[False] + squares[True]).sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # the 1e-6 of DeepSpeed's other stages
        for _, gradient in gradients:
            gradient.mul_(scale)
    return norm
