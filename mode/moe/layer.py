"""The expert feed-forward: router -> dispatcher -> experts and back, plus experts that are always on."""

from __future__ import annotations

from torch import Tensor, nn

from mode.config import ExpertsConfig
from mode.layers import SwiGLU
from mode.moe.backends import AutoDispatcher
from mode.moe.backends.megablocks import MegaBlocksDispatcher
from mode.moe.backends.native import NativeDispatcher
from mode.moe.dispatch import LocalDispatcher
from mode.moe.experts import Experts
from mode.moe.router import build_expert_router
from mode.routing import ExpertRouting


def processes_all(config: ExpertsConfig) -> bool:
    """Whether every choice is computed: there is no no-op to choose and no capacity to exceed."""
    return config.num_no_ops == 0 and config.capacity_factor is None


def build_dispatcher(config: ExpertsConfig) -> LocalDispatcher:
    """MegaBlocks' own where it fits: with no-ops or a capacity it would copy what nobody computes."""
    if config.backend == "megablocks" and processes_all(config):
        return MegaBlocksDispatcher(all_processed=True)
    of_its_own = {"native": NativeDispatcher, "auto": AutoDispatcher}
    return of_its_own.get(config.backend, LocalDispatcher)(processes_all(config))


class SharedExperts(SwiGLU):
    """Adds what the experts that are always on make of the tokens."""

    def add(self, mixed_TD: Tensor, x_TD: Tensor) -> Tensor:
        return mixed_TD + self(x_TD)


class NoSharedExperts(nn.Module):
    """Adds nothing."""

    def add(self, mixed_TD: Tensor, x_TD: Tensor) -> Tensor:
        return mixed_TD


class MoELayer(nn.Module):
    """Real experts and no-ops for T tokens. All experts live on this rank, unless `experts` holds a part of them."""

    def __init__(self, config: ExpertsConfig, width: int, experts: Experts | None = None) -> None:
        nn.Module.__init__(self)  # by name: the subclass for the engine has a second parent
        self.router = build_expert_router(config, width)
        self.dispatcher = build_dispatcher(config)
        self.experts = experts or Experts(config.num_experts, width, config.width, config.backend)
        self.shared = SharedExperts(width, config.num_shared * config.width) if config.num_shared else NoSharedExperts()

    def forward(self, x_TD: Tensor) -> tuple[Tensor, ExpertRouting]:
        x_TD, routing = self.router(x_TD)
        mixed_TD = self.dispatcher.mix(x_TD, routing, self.experts)
        return self.shared.add(mixed_TD, x_TD), routing
