"""A GPT in plain torch with experts and a depth-routed block, trained by a loop of its own on DeepSpeed.

    python docs/examples/own_gpt.py
    deepspeed --num_gpus 2 docs/examples/own_gpt.py --ep_size 2 --stage 1

It learns the bytes of this file, in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mode

WIDTH, HEADS, LENGTH, ROWS = 64, 4, 64, 8
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, number: int, ep_size: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        # Initial weights come from `layer`, not from torch's generator: the same for any ep_size.
        experts = {"num_experts": 4, "k": 2, "expert_width": 96, "num_no_ops": 1, "no_op_fraction": 0.25}
        losses = {"balance_weight": 0.01, "bias_rate": 0.01}
        self.moe = mode.MoE(WIDTH, ep_size=ep_size, layer=number, **experts, **losses)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = (table.unsqueeze(1) for table in rotary)  # of all heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm_2(x))[0]


class GPT(nn.Module):
    def __init__(self, ep_size: int = 1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block(number, ep_size) for number in range(3))
        # The middle block sees half of the tokens, each with its own entries of the rotary tables.
        self.blocks[1] = mode.DepthRouted(
            self.blocks[1], WIDTH, 0.5, per_token={"rotary": 1}, predictor_width=16, warmup_steps=5, layer=1
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting every next byte."""
        x = self.embedding(ids)
        frequencies = 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2, device=ids.device)
        angles = torch.arange(ids.shape[1], device=ids.device).unsqueeze(1) * frequencies
        rotary = (angles.cos().unsqueeze(0), angles.sin().unsqueeze(0))  # [1, tokens, half a head]: for all rows
        for block in self.blocks:
            x = block(x, rotary)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def build(ep_size: int = 1) -> nn.Module:
    torch.manual_seed(0)  # all ranks begin alike
    return GPT(ep_size)


def batch(step: int) -> Tensor:
    """[ROWS, LENGTH]: what all ranks together see in a step."""
    starts = torch.randint(len(TEXT) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
    return TEXT[starts.unsqueeze(1) + torch.arange(LENGTH)]


def settings(stage: int = 1, optimizer: str = "AdamW", lr: float = 0.003) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_batch_size": ROWS,
        "optimizer": {
            "type": optimizer,
            "params": {"lr": lr, **({"torch_adam": True} if optimizer == "AdamW" else {})},
        },
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
    }


def train(config: dict[str, Any], ep_size: int, steps: int) -> tuple[Any, list[float]]:
    """The engine after training, and this rank's losses: of every step, then in evaluation."""
    model = build(ep_size)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    rank, num_ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    losses = []
    for step in range(steps):
        ids = batch(step).chunk(num_ranks)[rank].to(engine.device)
        with mode.collect_routing(engine) as records:
            loss = engine(ids)
        engine.backward(loss + mode.auxiliary_loss(records))
        engine.step()
        mode.after_step(engine, records)  # moves the biases of the routers, advances the warm-up
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    engine.eval()  # each token decides for itself whether it is kept: no token sees a later one
    with torch.no_grad():
        losses.append(engine(batch(steps).chunk(num_ranks)[rank].to(engine.device)).item())
    return engine, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep_size", type=int, default=1, help="ranks that share the experts of a layer")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    arguments = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    for name, value in alone.items():  # as plain `python`
        os.environ.setdefault(name, value)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # or, on a CPU, DeepSpeed compiles for a minute first
    )
    deepspeed.init_distributed()
    _, losses = train(settings(arguments.stage), arguments.ep_size, arguments.steps)
    if deepspeed.comm.get_rank() == 0:
        print(f"evaluation: loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
    deepspeed.comm.destroy_process_group()
