"""Causal self-attention over the slots of a placement, with grouped key/value heads.

Knows nothing of routing: a routed block hands it fewer slots and their own placement. Nor of what was
attended to before: whoever decodes with a cache hands it another `attend`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from mode.config import ModelConfig
from mode.model.rope import rotate_heads
from mode.placement import Placement


def attend_causally(q_BSNH: Tensor, k_BSGH: Tensor, v_BSGH: Tensor, placement: Placement) -> Tensor:
    """Every slot sees itself and those before it, of its own document."""
    attended_BNSH = F.scaled_dot_product_attention(
        q_BSNH.transpose(1, 2),
        k_BSGH.transpose(1, 2),
        v_BSGH.transpose(1, 2),
        attn_mask=placement.mask_B1SS,
        is_causal=placement.mask_B1SS is None,
        enable_gqa=True,
    )
    return attended_BNSH.transpose(1, 2)


# From queries, keys and values of a grid to what its slots attended to, [B, S, N, H]. A cache offers two more.
Attend = Callable[[Tensor, Tensor, Tensor, Placement], Tensor]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = config.num_heads, config.num_kv_heads, config.head_width
        self.qkv = nn.Linear(config.width, config.qkv_width, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, placement: Placement, attend: Attend = attend_causally) -> Tensor:
        heads_BSNH = self.qkv(x_BSD).unflatten(-1, (-1, self.head_width))
        q_BSNH, k_BSGH, v_BSGH = rotate_heads(heads_BSNH, placement.cos_BSH, placement.sin_BSH, self.num_kv_heads)
        return self.out(attend(q_BSNH, k_BSGH, v_BSGH, placement).flatten(2))
