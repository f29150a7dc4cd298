"""A transformer block: one body, two thin wrappers.

The body returns the update, not the stream. So the plain block is x + update and the depth-routed
block is x + gate * update of the kept tokens (paper eq. 1): x is added once, unscaled.

A block runs in three ways: `forward` over whole sequences; for sampling, `prefill` over the prompts and
`step` over one more token per row, both with a cache. They differ in how attention gets at keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from mode.config import ExpertsConfig, ModeConfig
from mode.depth.router import Routed, build_depth_router
from mode.depth.tokens import add_to_tokens, flat_index
from mode.layers import RMSNorm, SwiGLU
from mode.model.attention import Attend, Attention, attend_causally
from mode.model.cache import BlockCache
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
        self.attention_norm = RMSNorm(model.width, eps=model.norm_eps)
        self.attention = Attention(model)
        self.feed_forward_norm = RMSNorm(model.width, eps=model.norm_eps)
        self.feed_forward = (
            DenseFeedForward(model.width, model.ffn_width)
            if config.experts is None
            else expert_layer(config.experts, model.width)
        )

    def forward(
        self, x_BSD: Tensor, placement: Placement, attend: Attend = attend_causally
    ) -> tuple[Tensor, ExpertRouting | None]:
        attended_BSD = self.attention(self.attention_norm(x_BSD), placement, attend)
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
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str | None = None
    ) -> tuple[Tensor, BlockRouting]:
        update_BLD, experts = self.body(x_BLD, placement)
        return x_BLD + update_BLD, BlockRouting(self.layer, placement, None, experts)

    def prefill(
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str, cache: BlockCache
    ) -> Tensor:
        update_BLD, _ = self.body(x_BLD, placement, cache.fill)
        return x_BLD + update_BLD

    def step(
        self, x_B1D: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str, cache: BlockCache
    ) -> Tensor:
        update_B1D, _ = self.body(x_B1D, placement, cache.extend)
        return x_B1D + update_B1D


class DepthRoutedBlock(nn.Module):
    """The kept tokens go through the body, each update times its gate; the rest ride the residual."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        super().__init__()
        assert config.depth is not None
        self.layer = layer
        self.router = build_depth_router(config.depth, config.model.width, config.seed, layer)
        self.body = BlockBody(config, expert_layer)

    def forward(
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str | None = None
    ) -> tuple[Tensor, BlockRouting]:
        """As in training or, where `causal` names what tokens decide by, as in sampling."""
        if causal is None:
            routed = self.router(x_BLD, sample_keys_B)
        else:
            routed = self.router.causal(x_BLD, sample_keys_B, placement.positions_BS, causal)
        return self._run(routed, placement, attend_causally)

    def prefill(
        self, x_BLD: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str, cache: BlockCache
    ) -> Tensor:
        """The causal forward pass; `cache` takes the keys and values of the kept tokens."""
        positions_BL, present_BL = placement.positions_BS, placement.present_BS
        routed = self.router.causal(x_BLD, sample_keys_B, positions_BL, causal, present_BL)
        _, kept_BSD, _ = routed
        if kept_BSD.shape[1] == 0:
            return x_BLD
        return self._run(routed, placement, cache.fill)[0]

    def step(
        self, x_B1D: Tensor, placement: Placement, sample_keys_B: Tensor, causal: str, cache: BlockCache
    ) -> Tensor:
        """One more token per row: only the rows that keep theirs are computed, and nothing if none does.

        Whether a row keeps its token decides what is launched, so the device is waited for.
        """
        decision = self.router.decide(x_B1D, sample_keys_B, placement.positions_BS, causal)
        rows_T = decision.keep_BL[:, 0].cpu().nonzero().squeeze(1)
        if len(rows_T) == 0:
            return x_B1D
        index_T = rows_T.to(x_B1D.device)
        update_T1D, _ = self.body(x_B1D[index_T], placement.rows(index_T), partial(cache.extend, rows_T=rows_T))
        gated_T1D = (self.router.gate(decision.logits_BL[index_T]).unsqueeze(-1) * update_T1D).to(x_B1D.dtype)
        return x_B1D.index_add(0, index_T, gated_T1D)

    def _run(self, routed: Routed, placement: Placement, attend: Attend) -> tuple[Tensor, BlockRouting]:
        x_BLD, kept_BSD, depth = routed
        kept = placement.take(depth.kept_BS, depth.valid_BS)
        update_BSD, experts = self.body(kept_BSD, kept, attend)
        gated_BSD = (depth.gates_BS.unsqueeze(-1) * update_BSD).to(x_BLD.dtype)
        index_T = kept.flatten(flat_index(depth.kept_BS, x_BLD.shape[1]))
        out_BLD = add_to_tokens(x_BLD, index_T, kept.flatten(gated_BSD))
        return out_BLD, BlockRouting(self.layer, kept, depth, experts)


def build_block(config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> nn.Module:
    return (DepthRoutedBlock if config.is_routed(layer) else Block)(config, layer, expert_layer)
