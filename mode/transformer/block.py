"""A transformer block: one body, two thin wrappers.

The body returns the update, not the stream. So the plain block is x + update and the depth-routed
block is x + gate * update of the kept tokens (paper eq. 1): x is added once, unscaled.

A block runs in three ways: `forward` over whole sequences; for sampling, `prefill` over the prompts and
`step` over one more token per row, both with a cache. They differ in how attention gets at keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from torch import Tensor, nn

from mode.config.settings import ModeConfig
from mode.depth.layer import DepthLayer
from mode.depth.router import Routed
from mode.layers import Initial, SwiGLU
from mode.moe.layer import LocalMoE
from mode.ops import rms_norm
from mode.records import flatten, only_present, present_slots, unflatten
from mode.transformer.attention import Attend, Attention, Grid, attend_causally
from mode.transformer.cache import BlockCache

ExpertLayer = Callable[..., LocalMoE]  # LocalMoE, or the engine's one, which keeps only this rank's experts


class RMSNorm(nn.RMSNorm):
    def forward(self, x_XD: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x_XD, self.weight, self.eps)


class DenseFeedForward(nn.Module):
    def __init__(self, width: int, hidden_width: int, initial: Initial, output_scale: float) -> None:
        super().__init__()
        self.swiglu = SwiGLU(width, hidden_width, initial.part("swiglu"), output_scale)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor]:
        """A tuple, as the expert layer's: the output comes first. Fillers are left out and get zero."""
        used_BS = present_slots(x_BSD.shape)
        mixed_TD = self.swiglu(flatten(x_BSD, used_BS))
        return (unflatten(mixed_TD, (x_BSD.shape[0], x_BSD.shape[1]), used_BS),)


class BlockBody(nn.Module):
    """Attention, then feed-forward: what the block adds to the stream."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        super().__init__()
        model, initial = config.model, Initial.of_block(config.seed, layer).part("body")
        output_scale = (2 * model.num_layers) ** -0.5  # 2 updates per block are added to one stream
        self.attention_norm = RMSNorm(model.width, eps=model.norm_eps)
        self.attention = Attention(model, initial.part("attention"), output_scale)
        self.feed_forward_norm = RMSNorm(model.width, eps=model.norm_eps)
        if config.experts is None:
            initial = initial.part("feed_forward")
            self.feed_forward: nn.Module = DenseFeedForward(model.width, model.ffn_width, initial, output_scale)
        else:
            self.feed_forward = expert_layer(
                model.width, config=config.experts, seed=config.seed, layer=layer, output_scale=output_scale
            )

    def forward(self, x_BSD: Tensor, grid: Grid, attend: Attend = attend_causally) -> Tensor:
        attended_BSD = self.attention(self.attention_norm(x_BSD), grid, attend)
        with only_present(grid.valid_BS):
            mixed_BSD = self.feed_forward(self.feed_forward_norm(x_BSD + attended_BSD))[0]
        return attended_BSD + mixed_BSD


class Block(nn.Module):
    """Every token goes through the body."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        super().__init__()
        self.layer = layer
        self.body = BlockBody(config, layer, expert_layer)

    def forward(
        self,
        x_BLD: Tensor,
        grid: Grid,
        sample_keys_B: Tensor,
        causal: str | None = None,
        capacity_fraction: Fraction | None = None,
    ) -> Tensor:
        return x_BLD + self.body(x_BLD, grid)

    def prefill(self, x_BLD: Tensor, grid: Grid, sample_keys_B: Tensor, causal: str, cache: BlockCache) -> Tensor:
        return x_BLD + self.body(x_BLD, grid, cache.fill)

    def step(self, x_B1D: Tensor, grid: Grid, sample_keys_B: Tensor, causal: str, cache: BlockCache) -> Tensor:
        return x_B1D + self.body(x_B1D, grid, cache.extend)


class DepthRoutedBlock(DepthLayer):
    """The kept tokens go through the body, each update times its gate; the rest ride the residual."""

    def __init__(self, config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> None:
        assert config.depth is not None
        super().__init__(config.depth, config.model.width, config.seed, layer)
        self.layer = layer
        self.body = BlockBody(config, layer, expert_layer)

    def forward(
        self,
        x_BLD: Tensor,
        grid: Grid,
        sample_keys_B: Tensor,
        causal: str | None = None,
        capacity_fraction: Fraction | None = None,
    ) -> Tensor:
        """As in training or, where `causal` names what tokens decide by, as in sampling.

        `capacity_fraction` is the share of a sequence to keep, where a warm-up says another than the configuration.
        """
        if causal is None:
            routed = self.router(x_BLD, sample_keys_B, capacity_fraction)
        else:
            routed = self.router.causal(x_BLD, sample_keys_B, grid.positions_BS, causal)
        out_BLD = self._update(x_BLD, routed, grid, attend_causally)
        self.put_record(x_BLD, routed[0], competing=causal is None)
        return out_BLD

    def prefill(self, x_BLD: Tensor, grid: Grid, sample_keys_B: Tensor, causal: str, cache: BlockCache) -> Tensor:
        """The causal forward pass; `cache` takes the keys and values of the kept tokens."""
        routed = self.router.causal(x_BLD, sample_keys_B, grid.positions_BS, causal, grid.valid_BS)
        if routed[1].shape[1] == 0:
            return x_BLD
        return self._update(x_BLD, routed, grid, cache.fill)

    def step(self, x_B1D: Tensor, grid: Grid, sample_keys_B: Tensor, causal: str, cache: BlockCache) -> Tensor:
        """One more token per row: only the rows that keep theirs are computed, and nothing if none does.

        Whether a row keeps its token decides what is launched, so the device is waited for.
        """
        decision = self.router.decide(x_B1D, sample_keys_B, grid.positions_BS, causal)
        rows_T = decision.keep_BL[:, 0].cpu().nonzero().squeeze(1)
        if len(rows_T) == 0:
            return x_B1D
        index_T = rows_T.to(x_B1D.device)
        update_T1D = self.body(x_B1D[index_T], grid.rows(index_T), partial(cache.extend, rows_T=rows_T))
        gated_T1D = (self.router.gate(decision.logits_BL[index_T]).unsqueeze(-1) * update_T1D).to(x_B1D.dtype)
        return x_B1D.index_add(0, index_T, gated_T1D)

    def _update(self, x_BLD: Tensor, routed: Routed, grid: Grid, attend: Attend) -> Tensor:
        routing, kept_BSD = routed
        update_BSD = self.body(kept_BSD, grid.take(routing.kept_BS, routing.valid_BS), attend)
        return self.add_back(x_BLD, routing, update_BSD)


def build_block(config: ModeConfig, layer: int, expert_layer: ExpertLayer) -> Block | DepthRoutedBlock:
    return (DepthRoutedBlock if config.is_routed(layer) else Block)(config, layer, expert_layer)
