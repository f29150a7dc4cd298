"""Small parts that more than one package builds on, and where their initial weights come from. No routing here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mode.ops import at_least_float32


@dataclass(frozen=True)
class Initial:
    """Draws the initial weights of a module from an explicit key, never from a running generator.

    So they do not depend on the number of ranks, on which experts a rank holds, on what was drawn before, or on where
    the module stands in the model. The keys are those that the first release used, so its results stay reproducible.
    """

    seed: int
    key: str

    @staticmethod
    def of_block(seed: int, layer: int) -> Initial:
        return Initial(seed, f"blocks.{layer}")

    @staticmethod
    def of_experts(seed: int, layer: int) -> Initial:
        return Initial.of_block(seed, layer).part("body.feed_forward")

    def part(self, name: str | int) -> Initial:
        return Initial(self.seed, f"{self.key}.{name}")

    @torch.no_grad()
    def fill(self, weight: Tensor, scale: float = 1.0) -> None:
        """Normal numbers of size scale / sqrt(fan-in): a unit input gives an output of size `scale`."""
        if weight.is_meta:  # a model that is about to be given its weights
            return
        digest = hashlib.sha256(f"{self.seed}/{self.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        weight.copy_(torch.randn(weight.shape, generator=generator) * (scale * weight.shape[-1] ** -0.5))


class Linear(nn.Linear):
    """Torch's, with weights from an explicit key and a bias of zeros.

    `scale`: the size of its output for a unit input; less than 1 where many such layers write to one residual stream.
    """

    def __init__(self, width: int, out_width: int, initial: Initial, *, scale: float = 1.0, bias: bool = False) -> None:
        self.initial, self.scale = initial, scale  # before torch's constructor, which calls reset_parameters
        super().__init__(width, out_width, bias=bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.initial.fill(self.weight, self.scale)
        if self.bias is not None:
            self.bias.zero_()


class Scorer(nn.Module):
    """The weights of a router, which scores in float32 whatever the model's precision.

    A module of its own, whose `forward` returns tensors: ZeRO-3 gathers a module's parameters when it is called, and
    for backward only if it finds tensors among the outputs, where it does not look into records.
    """

    def __init__(self, width: int, out_width: int, initial: Initial) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, width))
        initial.fill(self.weight)

    def logits(self, x_XD: Tensor) -> Tensor:
        with torch.autocast(x_XD.device.type, enabled=False):
            return F.linear(at_least_float32(x_XD), at_least_float32(self.weight))


class SwiGLU(nn.Module):
    """The gated feed-forward: w2 (silu(w1 x) * w3 x). `scale` is that of its output."""

    def __init__(self, width: int, hidden_width: int, initial: Initial, scale: float = 1.0) -> None:
        super().__init__()
        self.w1 = Linear(width, hidden_width, initial.part("w1"))
        self.w2 = Linear(hidden_width, width, initial.part("w2"), scale=scale)
        self.w3 = Linear(width, hidden_width, initial.part("w3"))

    def forward(self, x_XD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_XD)) * self.w3(x_XD))


def mean(values: Tensor) -> Tensor:
    """0 of nothing, connected to the model all the same: a rank without rows still enters backward's collectives."""
    return values.mean() if values.numel() else values.sum()


def balance(share_XJ: Tensor, score_XJ: Tensor, target_J: Tensor) -> Tensor:
    """sum_j f_j P_j / t_j. With f = P it is smallest, 1, where both are the targets."""
    return (share_XJ * score_XJ / target_J).sum(dim=-1)
