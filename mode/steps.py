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
    modules = dict(inner_model(model).named_modules())
    _move_biases(modules, found)
    for module in modules.values():
        if isinstance(module, DepthRouted):
            module.advance_warmup()


def _move_biases(modules: dict[str, nn.Module], records: list[LayerRecord]) -> None:
    layers: dict[str, ExpertRouter] = {}
    counts: dict[str, Tensor] = {}
    for name, module in modules.items():
        router = getattr(module, "router", None)
        if isinstance(router, ExpertRouter) and router.bias_J is not None:
            layers[name], counts[name] = router, torch.zeros_like(router.bias_J, dtype=torch.float64)
    if not layers:
        return
    for record in records:
        if record.name in layers and isinstance(record.routing, ExpertRouting):
            counts[record.name] += record.routing.choice_counts_J()
    together = torch.cat(list(counts.values()))
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(together)
    parts = together.split([len(each) for each in counts.values()])
    for router, counts_J in zip(layers.values(), parts, strict=True):
        router.move_bias(counts_J)
