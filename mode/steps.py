"""What must happen once per optimizer step beside the optimizer's own: biases move, warm-ups advance."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from mode.depth.layer import DepthRouted
from mode.moe.router import ExpertRouter
from mode.records import ExpertRouting, LayerRecord, RoutingRecords, inner_model


@torch.no_grad()
def after_step(model: nn.Module, records: RoutingRecords | Iterable[RoutingRecords]) -> None:
    """Moves the selection bias of every `MoE` of `model` and advances the warm-up of every `DepthRouted`.

    To be called once after every optimizer step, on all ranks, with the records of the step: those of one forward pass
    or, with gradient accumulation, a list with those of every micro-batch. The choices of all ranks count. A collective
    where there is a process group.
    """
    passes = [records] if isinstance(records, RoutingRecords) else list(records)
    found = [record for each in passes for record in each]
    modules = list(inner_model(model).modules())
    _move_biases(modules, found)
    for module in modules:
        if isinstance(module, DepthRouted):
            module.advance_warmup()


def _move_biases(modules: list[nn.Module], records: list[LayerRecord]) -> None:
    counts: dict[ExpertRouter, Tensor] = {
        module: torch.zeros_like(module.bias_J, dtype=torch.float64)
        for module in modules
        if isinstance(module, ExpertRouter) and module.bias_J is not None
    }
    if not counts:
        return
    known = 0
    for record in records:
        router = getattr(record.layer, "router", None)
        if isinstance(record.routing, ExpertRouting) and router in counts:
            counts[router] += record.routing.choice_counts_J()
            known += 1
    if not known:
        raise ValueError(
            "the records hold no choice of this model's layers, so its selection biases cannot move; collect them from "
            "the same model: `with mode.collect_routing(model) as records`"
        )
    together = torch.cat(list(counts.values()))
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(together)
    parts = together.split([len(each) for each in counts.values()])
    for router, counts_J in zip(counts, parts, strict=True):
        router.move_bias(counts_J)
