"""Why a run stops before its end, and what the process then returns.

`StepGuard` is asked once per step, before the optimizer moves anything: has any rank a loss or gradient
that is not finite, and has any rank been asked to stop? All ranks get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from mode.transformer.model import ModeTransformer

EXIT_BAD_INPUT = 2  # a setting, an argument or the data
EXIT_NOT_FINITE = 3
EXIT_SAVE_FAILED = 4
EXIT_WATCHDOG = 5  # another rank is lost: the run can be resumed


class NotFinite(Exception):
    """The loss or a gradient became infinite or not a number."""


class SaveFailed(Exception):
    """A checkpoint could not be written."""


def layer_group(parameter_name: str) -> str:
    """The part of the model a parameter belongs to, in words."""
    parts = parameter_name.split(".")
    if parts[0] != "blocks":
        return parts[0]
    named = {"attention": "attention", "attention_norm": "attention", "feed_forward_norm": "feed-forward"}
    if parts[2] == "router":
        return f"block {parts[1]} depth router"
    if parts[3] == "feed_forward":
        inner = {"router": "expert router", "experts": "experts", "shared": "shared experts"}
        return f"block {parts[1]} {inner.get(parts[4], 'feed-forward')}"
    return f"block {parts[1]} {named[parts[3]]}"


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on before an optimizer step."""

    stop: bool  # some rank was asked to stop
    bad_loss_ranks: list[int]
    bad_groups: dict[int, list[str]]  # rank -> layer groups with a gradient that is not finite


class StepGuard:
    """Watches every gradient as it is made, by layer group, without waiting for the device."""

    def __init__(self, model: nn.Module, device: torch.device, watch_gradients: bool) -> None:
        names = [name for name, _ in model.named_parameters()]
        self.groups = list(dict.fromkeys(layer_group(name) for name in names))
        self.bad = torch.zeros(2 + len(self.groups), device=device)  # loss, stop, then one per group
        if watch_gradients:
            for name, parameter in model.named_parameters():
                parameter.register_hook(self._watch(2 + self.groups.index(layer_group(name))))

    def _watch(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.bad[index] += ~torch.isfinite(gradient.sum(dtype=torch.float32))

        return hook

    def see_loss(self, loss: Tensor) -> None:
        self.bad[0] += ~torch.isfinite(loss.detach())

    def verdict(self, stop_requested: bool) -> Verdict:
        """Collects what was seen since the last call, from all ranks."""
        self.bad[1] = float(stop_requested)
        seen = [torch.empty_like(self.bad) for _ in range(distributed.get_world_size())]
        distributed.all_gather(seen, self.bad)
        rows = torch.stack(seen).tolist()
        self.bad.zero_()
        return Verdict(
            stop=any(row[1] for row in rows),
            bad_loss_ranks=[rank for rank, row in enumerate(rows) if row[0]],
            bad_groups={
                rank: [group for group, bad in zip(self.groups, row[2:], strict=True) if bad]
                for rank, row in enumerate(rows)
                if any(row[2:])
            },
        )


@torch.no_grad()
def first_bad_block(model: ModeTransformer, inputs: dict[str, Any]) -> str:
    """Runs forward once more and names the first part whose output is not finite on this rank."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor) and not torch.isfinite(tensor).all():
                found.append(name)

        return hook

    blocks = {f"block {layer}": block for layer, block in enumerate(model.blocks)}
    parts: dict[str, nn.Module] = {"embedding": model.embedding, **blocks, "head": model.head}
    handles = [module.register_forward_hook(watch(name)) for name, module in parts.items()]
    model(**inputs)
    for handle in handles:
        handle.remove()
    return found[0] if found else "the loss itself"


def describe_not_finite(verdict: Verdict, model: ModeTransformer, inputs: dict[str, Any]) -> str:
    """Which ranks have a loss or gradients that are not finite, and where. All ranks enter with the same verdict."""
    if not verdict.bad_loss_ranks:
        return "; ".join(
            f"the gradient of rank {rank} is not finite in {', '.join(groups)}"
            for rank, groups in verdict.bad_groups.items()
        )
    where = first_bad_block(model, inputs)  # every rank runs it: a forward pass can be a collective
    places: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(places, where)
    ranks = verdict.bad_loss_ranks
    return "; ".join(f"the loss of rank {rank} is not finite, first seen in {places[rank]}" for rank in ranks)
