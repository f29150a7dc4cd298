"""Rotary positions, from explicit positions: a kept token turns by its own place in the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from mode.native import functions as native


def rope_tables(positions_BL: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of shape [B, L, head_width / 2]. Computed in float64: large angles lose digits in float32."""
    powers_H = torch.arange(0, head_width, 2, device=positions_BL.device, dtype=torch.float64) / head_width
    angles_BLH = positions_BL.unsqueeze(-1) * theta**-powers_H
    return angles_BLH.cos().to(dtype), angles_BLH.sin().to(dtype)


def rotate_heads(
    heads_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values) of heads that lie in that order, the first two turned by their tokens' angles."""
    if native.takes(heads_BSNH, cos_BSH, sin_BSH):
        return native.rotate_heads(heads_BSNH, cos_BSH, sin_BSH, num_kv_heads)
    turning, v_BSGH = heads_BSNH[:, :, :-num_kv_heads], heads_BSNH[:, :, -num_kv_heads:]
    turned = rotate(turning, cos_BSH, sin_BSH)
    return turned[:, :, :-num_kv_heads], turned[:, :, -num_kv_heads:], v_BSGH


def rotate(x_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor) -> Tensor:
    """Turns each pair (i, i + head_width / 2) of a head by its token's angle."""
    cos_BS1H, sin_BS1H = cos_BSH.unsqueeze(2), sin_BSH.unsqueeze(2)
    first, second = x_BSNH.chunk(2, dim=-1)
    return torch.cat([first * cos_BS1H - second * sin_BS1H, second * cos_BS1H + first * sin_BS1H], dim=-1)
