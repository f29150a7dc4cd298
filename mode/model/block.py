"""A transformer block: one body, two thin wrappers.

The body returns the update, not the stream. So the plain block is x + update and the depth-routed
block is x + gate * update of the kept tokens (paper eq. 1): x is added once, unscaled.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mode.config import ExpertsConfig, ModeConfig
from mode.depth.router import build_depth_router
from mode.depth.tokens import add_to_tokens, flat_index, gather_tokens
from mode.layers import SwiGLU
from mode.model.attention import Attention
from mode.moe.layer import MoELayer
from mode.placement import Placement
from mode.routing import BlockRouting, ExpertRouting

ExpertLayer = Callable[[ExpertsConfig, int], MoELayer]  # from the experts' settings and the model's width


class DenseFeedForward(nn.Module):
    """The same signature as the expert feed-forward, with nothing to route."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.swiglu = SwiGLU(width, hidden_width)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, None]:
        return self.swiglu(x_TD), None


class BlockBody(nn.Module):
    """Attention, then feed-forward: what the block adds to the stream."""

    def __init__(self, config: ModeConfig, expert_layer: ExpertLayer) -> None:
        super().__init__()
        model = config.model
        self.attention_norm = nn.RMSNorm(model.width, eps=model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.width, eps=model.norm_eps)
        self.feed_forward = (
            DenseFeedForward(model.width, model.ffn_width)
            if config.experts is None
            else expert_layer(config.experts, model.width)
        )

    def forward(self, x_BSD: Tensor, placement: Placement) -> tuple[Tensor, ExpertRouting | None]:
        attended_BSD = self.attention(self.attention_norm(x_BSD), placement)
        middle_TD = placement.flatten(self.feed_forward_norm(x_BSD + attended_BSD))
        mixed_TD, experts = self.feed_forward(middle_TD)
        return attended_BSD + placement.unflatten(mixed_TD), experts


class Block(nn.Module):
    """Every token goes through the body."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        super().__init__()
        self.layer = layer
        self.body = BlockBody(config, expert_layer)

    def forward(
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: bool = False
    ) -> tuple[Tensor, BlockRouting]:
        update_BLD, experts = self.body(x_BLD, placement)
        return x_BLD + update_BLD, BlockRouting(self.layer, placement, None, experts)


class DepthRoutedBlock(nn.Module):
    """The kept tokens go through the body, each update times its gate; the rest ride the residual."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        super().__init__()
        assert config.depth is not None
        self.layer = layer
        self.router = build_depth_router(config.depth, config.model.width, config.seed, layer)
        self.body = BlockBody(config, expert_layer)

    def forward(
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: bool = False
    ) -> tuple[Tensor, BlockRouting]:
        route = self.router.causal if causal else self.router
        depth = route(x_BLD, sample_keys_B)
        kept = placement.take(depth.kept_BS, depth.valid_BS)
        update_BSD, experts = self.body(gather_tokens(x_BLD, depth.kept_BS), kept)
        gated_BSD = (depth.gates_BS.unsqueeze(-1) * update_BSD).to(x_BLD.dtype)
        index_T = kept.flatten(flat_index(depth.kept_BS, x_BLD.shape[1]))
        out_BLD = add_to_tokens(x_BLD, index_T, kept.flatten(gated_BSD))
        return out_BLD, BlockRouting(self.layer, kept, depth, experts)


def build_block(config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> nn.Module:
    return (DepthRoutedBlock if config.is_routed(layer) else Block)(config, layer, expert_layer)
