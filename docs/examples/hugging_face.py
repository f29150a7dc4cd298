"""Experts and depth routing in a model of `transformers`, trained by a loop of its own on DeepSpeed.

    python docs/examples/hugging_face.py
    deepspeed --num_gpus 2 docs/examples/hugging_face.py --family qwen3_moe --ep_size 2 --stage 1

The model is small and random, a Llama or a Qwen3-MoE; nothing is downloaded. It learns the bytes of this file.
Needs `pip install -e ".[hf]"`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import mode

WIDTH, LENGTH, ROWS = 64, 64, 8
TEXT = torch.tensor(list(Path(__file__).read_bytes()))
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Experts(nn.Module):
    """`mode.MoE` in the place of a feed-forward: hands on the output; the losses are in the records."""

    def __init__(self, layer: int, ep_size: int) -> None:
        super().__init__()
        experts = {"num_experts": 4, "k": 2, "expert_width": 64, "num_no_ops": 1, "no_op_fraction": 0.25}
        losses = {"balance_weight": 0.01, "bias_rate": 0.01}
        self.moe = mode.MoE(WIDTH, ep_size=ep_size, layer=layer, **experts, **losses)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def build(family: str = "llama", ep_size: int = 1) -> Any:
    """Of four layers the second and the fourth are depth-routed, and the last two have our experts."""
    torch.manual_seed(0)  # all ranks begin alike
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    layers = model.model.layers
    for number in (2, 3):
        layers[number].mlp = Experts(number, ep_size)
    for number in (1, 3):
        layers[number] = mode.DepthRouted(layers[number], WIDTH, 0.5, aux_weight=0.01, warmup_steps=5, layer=number)
    return model


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


def train(config: dict[str, Any], family: str, ep_size: int, steps: int) -> tuple[Any, list[float]]:
    """The engine after training, and this rank's losses: of every step, then in evaluation."""
    model = build(family, ep_size)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    rank, num_ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    losses = []
    for step in range(steps):
        ids = batch(step).chunk(num_ranks)[rank].to(engine.device)
        with mode.collect_routing(engine) as records:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss + mode.auxiliary_loss(records))
        engine.step()
        mode.after_step(engine, records)  # moves the biases of the routers, advances the warm-up
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    engine.eval()  # each token decides for itself whether it is kept: no token sees a later one
    with torch.no_grad():
        ids = batch(steps).chunk(num_ranks)[rank].to(engine.device)
        losses.append(engine(input_ids=ids, labels=ids, use_cache=False).loss.item())
    return engine, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=("llama", "qwen3_moe"), default="llama")
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
    _, losses = train(settings(arguments.stage), arguments.family, arguments.ep_size, arguments.steps)
    if deepspeed.comm.get_rank() == 0:
        print(f"evaluation: loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
    deepspeed.comm.destroy_process_group()
