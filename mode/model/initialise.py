"""All initial weights. Each tensor draws from a generator of its own, seeded by the run's seed and the
tensor's name, each expert from one seeded by its number too. So the weights do not depend on the
number of ranks, on which experts a rank holds, or on what was drawn before.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from mode.config import ModeConfig, ModelConfig
from mode.layers import Scorer
from mode.moe.experts import Experts

LOOKING_PAIRS = 6  # the fastest of a head's rotary pairs: few point at other places too, slow ones at all alike
LOOKING_STRENGTH = 4.0  # of each pair in the logit: the previous token gets 80 % of the attention or more


@torch.no_grad()
def initialise(model: nn.Module, config: ModeConfig) -> None:
    """Fills every parameter of `model`."""
    residual_scale = (2 * config.model.num_layers) ** -0.5  # 2L updates are added to one stream
    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding | Scorer):
            scale = residual_scale if _writes_to_the_stream(name) else 1.0
            if config.model.tied_head and name in ("embedding", "head"):
                # At full size every token would predict itself: the logit of its own entry would be sqrt(D).
                scale = config.model.width**-0.25
            _draw(module.weight, scale, config.seed, name)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
                if name.endswith("attention.qkv"):
                    _look_at_the_previous(module.bias, config.model)
        elif isinstance(module, Experts):
            for part, scale in (("w1", 1.0), ("w2", residual_scale), ("w3", 1.0)):
                for local, weight in enumerate(getattr(module, part)):
                    _draw(weight, scale, config.seed, f"{name}.{part}.{module.first + local}")


def _look_at_the_previous(bias: Tensor, model: ModelConfig) -> None:
    """Begins the first head as one that looks at the previous token, by place alone.

    A head that looks at what followed an earlier occurrence of its token can only form above such a head. Left to
    chance, a small model has neither for thousands of steps, or for good, and that decides more than any routing.

    A pair that turns by `angle` a place adds strength * cos(angle * (distance - 1)) to the logit: the query is turned
    back by one place.
    """
    if bias.is_meta:
        return
    width, half = model.head_width, model.head_width // 2
    pairs = min(LOOKING_PAIRS, half)
    size = (LOOKING_STRENGTH * width**0.5) ** 0.5  # attention divides the logit by the root of the width
    angles = model.rope_theta ** (-2 * torch.arange(pairs, dtype=torch.float64) / width)
    query, key = bias[:width], bias[model.num_heads * width :][:width]
    query[:pairs], query[half : half + pairs] = size * angles.cos(), -size * angles.sin()
    key[:pairs] = size


def _writes_to_the_stream(name: str) -> bool:
    return name.endswith(("attention.out", ".w2"))


def _draw(weight: Tensor, scale: float, seed: int, name: str) -> None:
    """Normal numbers of size scale / sqrt(fan-in): a unit input gives an output of size `scale`."""
    if weight.is_meta:  # a model that is about to be given its weights
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    weight.copy_(torch.randn(weight.shape, generator=generator) * (scale * weight.shape[-1] ** -0.5))
