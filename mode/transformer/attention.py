"""Causal self-attention over a grid of tokens, with grouped key/value heads and rotary positions.

Knows nothing of routing: a routed block hands it a smaller grid, whose tokens keep their positions and documents. Nor
of what was attended to before: whoever decodes with a cache hands it another `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mode.config.settings import ModelConfig
from mode.layers import Initial, Linear
from mode.ops import rotate_heads

LOOKING_PAIRS = 6  # the fastest of a head's rotary pairs: few point at other places too, slow ones at all alike
LOOKING_STRENGTH = 4.0  # of each pair in the logit: the previous token gets 80 % of the attention or more


@dataclass(frozen=True)
class Grid:
    """Where the tokens of B rows of S slots stand. Slots of a row are in ascending order of position, so "slot i may
    see slot j <= i" is the causal mask.

    Rows may hold different numbers of tokens. Fillers then stand behind every token of their row, so the causal mask
    hides them from the tokens.
    """

    positions_BS: Tensor  # int64, ascending in every row
    cos_BSH: Tensor  # rotary tables of those positions, H / 2 wide
    sin_BSH: Tensor
    documents_BS: Tensor | None = None  # int64; None: a row is one document
    mask_B1SS: Tensor | None = None  # bool, True where slot i may see slot j; None: plain causal
    valid_BS: Tensor | None = None  # bool, False at fillers; None: there are none

    @staticmethod
    def of_sequence(positions_BL: Tensor, cos_BLH: Tensor, sin_BLH: Tensor, documents_BL: Tensor | None) -> Grid:
        return Grid(positions_BL, cos_BLH, sin_BLH, documents_BL, _document_mask(documents_BL))

    def take(self, kept_BS: Tensor, valid_BS: Tensor | None) -> Grid:
        """The grid of the chosen slots. Rotary tables and documents are gathered, not recomputed."""
        rotary_BSH = kept_BS.unsqueeze(-1).expand(-1, -1, self.cos_BSH.shape[-1])
        documents_BS = None if self.documents_BS is None else self.documents_BS.gather(1, kept_BS)
        return Grid(
            self.positions_BS.gather(1, kept_BS),
            self.cos_BSH.gather(1, rotary_BSH),
            self.sin_BSH.gather(1, rotary_BSH),
            documents_BS,
            _document_mask(documents_BS),
            valid_BS,
        )

    def rows(self, rows_T: Tensor) -> Grid:
        """Some rows of a grid without documents."""
        assert self.documents_BS is None
        return Grid(self.positions_BS[rows_T], self.cos_BSH[rows_T], self.sin_BSH[rows_T])


def _document_mask(documents_BS: Tensor | None) -> Tensor | None:
    if documents_BS is None:
        return None
    same_BSS = documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)
    return torch.tril(same_BSS).unsqueeze(1)


def rope_tables(positions_BL: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of shape [B, L, head_width / 2]. Computed in float64: large angles lose digits in float32."""
    powers_H = torch.arange(0, head_width, 2, device=positions_BL.device, dtype=torch.float64) / head_width
    angles_BLH = positions_BL.unsqueeze(-1) * theta**-powers_H
    return angles_BLH.cos().to(dtype), angles_BLH.sin().to(dtype)


def attend_causally(q_BSNH: Tensor, k_BSGH: Tensor, v_BSGH: Tensor, grid: Grid) -> Tensor:
    """Every slot sees itself and those before it, of its own document."""
    attended_BNSH = F.scaled_dot_product_attention(
        q_BSNH.transpose(1, 2),
        k_BSGH.transpose(1, 2),
        v_BSGH.transpose(1, 2),
        attn_mask=grid.mask_B1SS,
        is_causal=grid.mask_B1SS is None,
        enable_gqa=True,
    )
    return attended_BNSH.transpose(1, 2)


# From queries, keys and values of a grid to what its slots attended to, [B, S, N, H]. A cache offers two more.
Attend = Callable[[Tensor, Tensor, Tensor, Grid], Tensor]


class QKV(Linear):
    """Queries, keys and values of every head. With a bias, the first head begins by looking at the previous token.

    A head that looks at what followed an earlier occurrence of its token can only form above such a head. Left to
    chance, a small model has neither for thousands of steps, or for good, and that decides more than any routing.
    """

    def __init__(self, config: ModelConfig, initial: Initial) -> None:
        self.config = config
        super().__init__(config.width, config.qkv_width, initial, bias=config.qkv_bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A pair that turns by `angle` a place adds strength * cos(angle * (distance - 1)) to the logit: the query is
        turned back by one place."""
        super().reset_parameters()
        model, bias = self.config, self.bias
        if bias is None or bias.is_meta:
            return
        width, half = model.head_width, model.head_width // 2
        pairs = min(LOOKING_PAIRS, half)
        size = (LOOKING_STRENGTH * width**0.5) ** 0.5  # attention divides the logit by the root of the width
        angles = model.rope_theta ** (-2 * torch.arange(pairs, dtype=torch.float64) / width)
        query, key = bias[:width], bias[model.num_heads * width :][:width]
        query[:pairs], query[half : half + pairs] = size * angles.cos(), -size * angles.sin()
        key[:pairs] = size


class Attention(nn.Module):
    """`output_scale`: the size of what it adds to the residual stream for a unit input."""

    def __init__(self, config: ModelConfig, initial: Initial, output_scale: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        self.qkv = QKV(config, initial.part("qkv"))
        heads_width = config.num_heads * config.head_width
        self.out = Linear(heads_width, config.width, initial.part("out"), scale=output_scale)

    def forward(self, x_BSD: Tensor, grid: Grid, attend: Attend = attend_causally) -> Tensor:
        heads_BSNH = self.qkv(x_BSD).unflatten(-1, (-1, self.head_width))
        q_BSNH, k_BSGH, v_BSGH = rotate_heads(heads_BSNH, grid.cos_BSH, grid.sin_BSH, self.num_kv_heads)
        return self.out(attend(q_BSNH, k_BSGH, v_BSGH, grid).flatten(2))
