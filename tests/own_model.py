"""Models of somebody's own with our layers, and the loops that train them: what tests of the public layers share."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mode

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 16, 8, 4


class OwnBlock(nn.Module):
    """Attention and experts, as anyone would write them."""

    def __init__(self, layer: int, **experts: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = mode.MoE(WIDTH, num_experts=4, k=2, layer=layer, **experts)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # q, k, v of two heads
        seen = positions[:, None, :, None] >= positions[:, None, None, :]
        x = x + self.out(F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(1, 2).flatten(2))
        return x + self.moe(self.norms[1](x))[0]


class OwnModel(nn.Module):
    """A GPT of somebody's own: the second block is depth-routed."""

    def __init__(self, warmup_steps: int = 0, **experts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        routed = OwnBlock(1, **experts)
        depth: dict[str, Any] = {"per_token": {"positions": 1}, "layer": 1, "warmup_steps": warmup_steps}
        self.blocks = nn.ModuleList([OwnBlock(0, **experts), mode.DepthRouted(routed, WIDTH, 0.5, **depth)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        for block in self.blocks:
            x = block(x, positions)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """One layout of a training run."""

    ep_size: int = 1
    stage: int = 0
    clip: float = 0.0
    accumulation: int = 1
    copied: bool = False  # the model is a deep copy
    partitioned: bool = False  # it was built under zero.Init


EXPERTS: dict[str, Any] = {
    "expert_width": 24,
    "num_no_ops": 2,
    "no_op_fraction": 0.25,
    "balance_weight": 0.02,
    "z_loss_weight": 0.001,
    "bias_rate": 0.01,
}


def batches(step: int) -> Tensor:
    """[ROWS, LENGTH]: the global batch of a step."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(100 + step))


def settings(case: Case, world_size: int) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 3000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def build(case: Case, world_size: int) -> nn.Module:
    if case.partitioned:
        with deepspeed.zero.Init(config_dict_or_path=settings(case, world_size)):
            model = OwnModel(ep_size=case.ep_size, **EXPERTS)
    else:
        model = OwnModel(ep_size=case.ep_size, **EXPERTS)
    return copy.deepcopy(model) if case.copied else model


def train_step(engine: Any, step: int, case: Case) -> float:
    """One optimizer step of the user's own loop; the mean loss of this rank's rows."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = batches(step).chunk(world_size)[rank]
    passes, losses = [], []
    for micro in mine.chunk(case.accumulation):
        with mode.collect_routing(engine) as records:
            loss = engine(micro)
        engine.backward(loss + mode.auxiliary_loss(records))
        engine.step()
        passes.append(records)
        losses.append(loss.item())
    mode.after_step(engine, passes)
    return sum(losses) / len(losses)
