"""All initial weights. Each tensor draws from a generator of its own, seeded by the run's seed and the
tensor's name, each expert from one seeded by its number too. So the weights do not depend on the
number of ranks, on which experts a rank holds, or on what was drawn before.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from mode.config import ModeConfig
from mode.layers import Float32Linear
from mode.moe.experts import Experts


@torch.no_grad()
def initialise(model: nn.Module, config: ModeConfig) -> None:
    """Fills every parameter of `model`."""
    residual_scale = (2 * config.model.num_layers) ** -0.5  # 2L updates are added to one stream
    for name, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding | Float32Linear):
            scale = residual_scale if _writes_to_the_stream(name) else 1.0
            if config.model.tied_head and name in ("embedding", "head"):
                # At full size every token would predict itself: the logit of its own entry would be sqrt(D).
                scale = config.model.width**-0.25
            _draw(module.weight, scale, config.seed, name)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Experts):
            for part, scale in (("w1", 1.0), ("w2", residual_scale), ("w3", 1.0)):
                for local, weight in enumerate(getattr(module, part)):
                    _draw(weight, scale, config.seed, f"{name}.{part}.{module.first + local}")


def _writes_to_the_stream(name: str) -> bool:
    return name.endswith(("attention.out", ".w2"))


def _draw(weight: Tensor, scale: float, seed: int, name: str) -> None:
    """Normal numbers of size scale / sqrt(fan-in): a unit input gives an output of size `scale`."""
    if weight.is_meta:  # a model that is about to be given its weights
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    weight.copy_(torch.randn(weight.shape, generator=generator) * (scale * weight.shape[-1] ** -0.5))
