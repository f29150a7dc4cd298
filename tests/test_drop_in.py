"""A script that uses DeepSpeed's expert layer trains with ours when its import is changed, and nothing else."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from torch import nn

import mode
from mode.local_ranks import run_on_ranks
from mode.training.loop.engine import start_process_group
from tests.launch import CONTEXT

SCRIPT = """
import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--k", type=int)
parser.add_argument("--ep_size", type=int)
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.moe = MoE(16, expert, num_experts=4, ep_size=args.ep_size, k=args.k)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = self.embed(x)
        mixed, l_aux, expert_counts = self.moe(x)
        return self.head(x + mixed).squeeze(-1), l_aux, expert_counts


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
torch.manual_seed(0)
model = Model()
groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
config = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1000000,
}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
generator = torch.Generator().manual_seed(engine.global_rank)
losses = []
for step in range(40):
    x = torch.randn(16, 8, generator=generator)
    output, l_aux, expert_counts = engine(x)
    loss = torch.nn.functional.mse_loss(output, x[:, :2].abs().sum(dim=-1))
    engine.backward(loss + 0.01 * l_aux)
    engine.step()
    losses.append(loss.item())
"""
THEIRS, OURS = "from deepspeed.moe.layer import MoE\n", "from mode import MoE\n"
CASES = [(k, ep_size) for k in (1, 2) for ep_size in (1, 2)]


def run_script(path: Path, k: int, ep_size: int) -> dict[str, Any]:
    """What the script leaves behind: its losses, and the layer it used."""
    arguments = sys.argv
    sys.argv = [str(path), "--k", str(k), "--ep_size", str(ep_size)]
    try:
        found = runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = arguments
    layer = found["model"].moe
    return {
        "losses": found["losses"],
        "is ours": isinstance(layer, mode.MoE),
        "experts here": layer.num_local_experts,
        "counts": found["expert_counts"].tolist(),
    }


def compare_with_deepspeeds(k: int, ep_size: int) -> dict[str, Any]:
    """Largest differences between DeepSpeed's dropless layer and ours with the same weights, on this rank's tokens."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(3)
    expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    theirs = DeepSpeedMoE(
        16, expert, 4, ep_size=ep_size, k=k, drop_tokens=False, top2_2nd_expert_sampling=False, use_rts=False
    )
    theirs.set_deepspeed_parallelism()
    ours = mode.MoE(16, expert, 4, ep_size, k)
    ours.set_deepspeed_parallelism()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        ours.router.scorer.weight.copy_(theirs.deepspeed_moe.gate.wg.weight)
        stacked = [torch.randn(4, 1, part.shape[2], generator=generator) * 0.3 for part in ours.experts.parameters()]
        first = ours.experts.first
        for part, values in zip(ours.experts.parameters(), stacked, strict=True):
            part.copy_(values[first : first + len(part)])
        for e, each in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            flat = torch.cat([part[e, 0] for part in ours.experts.parameters()])
            nn.utils.vector_to_parameters(flat[: sum(p.numel() for p in each.parameters())], each.parameters())
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(rank))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    (out, l_aux, counts), (their_out, their_l_aux, their_counts) = ours(inputs[0]), theirs(inputs[1])
    for output in (out, their_out):
        output.square().sum().backward()
    gradients = [ours.router.scorer.weight.grad, theirs.deepspeed_moe.gate.wg.weight.grad]
    return {
        "output": float((out - their_out).detach().abs().max()),
        "size": float(their_out.detach().abs().max()),
        "input": float((inputs[0].grad - inputs[1].grad).abs().max()),
        "router": float((gradients[0] - gradients[1]).abs().max()),
        "l_aux": (l_aux.item(), their_l_aux.item()),
        "counts": (counts.tolist(), their_counts.tolist()),
    }


def on_a_rank(original: Path, changed: Path) -> dict[str, Any]:
    start_process_group()
    return {
        "original": {case: run_script(original, *case) for case in CASES},
        "changed": {case: run_script(changed, *case) for case in CASES},
        "same weights": {case: compare_with_deepspeeds(*case) for case in CASES},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scripts")
    assert SCRIPT.count(THEIRS) == 1
    (folder / "original.py").write_text(SCRIPT)
    (folder / "changed.py").write_text(SCRIPT.replace(THEIRS, OURS))
    return run_on_ranks(on_a_rank, 2, folder / "original.py", folder / "changed.py", seconds=200, context=CONTEXT)


@pytest.mark.parametrize("case", CASES, ids="k={0[0]}, ep_size={0[1]}".format)
@pytest.mark.parametrize("script", ("original", "changed"))
def test_the_script_trains_on_every_rank(ranks: Any, script: str, case: tuple[int, int]) -> None:
    k, ep_size = case
    for found in ranks:
        result = found[script][case]
        first, last = sum(result["losses"][:5]), sum(result["losses"][-5:])
        assert last < 0.5 * first, result["losses"]
        assert result["is ours"] == (script == "changed") and result["experts here"] == 4 // ep_size
        if script == "changed":
            assert sum(result["counts"]) == 16 * k, "nothing is dropped"


@pytest.mark.parametrize("case", CASES, ids="k={0[0]}, ep_size={0[1]}".format)
def test_a_dropless_layer_with_the_same_weights_equals_deepspeeds(ranks: Any, case: tuple[int, int]) -> None:
    for found in ranks:
        result = found["same weights"][case]
        for what in ("output", "input", "router"):
            assert result[what] < 2e-5 * max(1.0, result["size"]), result
        assert result["size"] > 0.1
        if case[0] == 1:  # with two choices DeepSpeed's balance looks at the first alone
            assert result["l_aux"][0] == pytest.approx(result["l_aux"][1], rel=1e-5)
            assert result["counts"][0] == result["counts"][1]
