"""Measures how much the layout changes the result: expert parallelism x ZeRO stage x accumulation.

    python tools/parity.py                          the fp32 matrix on 4 ranks against one process
    python tools/parity.py --precision bf16
    python tools/parity.py --write docs/parity.md   keep the table

Every case trains the same small model on the same global batches, with real processes and the real
engine, and is compared with one process at ZeRO stage 1 step by step: the largest relative difference of
a step's loss and gradient norm, and the largest difference of a final weight.

Routing is discrete: where two candidates are closer than rounding, the layout decides between them and
the runs part. So in fp32 the training data are drawn, per reference run, such that no decision of it is
closer than MARGIN; the closest one is reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks share this machine's cores

from mode.tooling import output_for_figures_alone

with output_for_figures_alone():
    import deepspeed
    import numpy as np
    import torch
    from torch import Tensor, distributed
    from tqdm import tqdm

    from mode.config.file import RunConfig, run_config_from_dict
    from mode.data import TrainLoader
    from mode.local_ranks import run_on_ranks
    from mode.moe.deepspeed import MoE
    from mode.records import BlockRouting
    from mode.training.loop.engine import build_engine, build_model, device, start_process_group
    from mode.training.loop.step import Step, optimizer_step

BATCH, LENGTH, VOCABULARY = 8, 16, 64
STAGES = (0, 1, 2, 3)
MARGIN = 2e-5  # of logits of size 1; rounding moves them by some 1e-6
WANTED = {
    "fp32": {"loss": 1e-6, "grad_norm": 1e-5, "weights": 1e-5},
    "bf16": {"loss": 2**-8, "grad_norm": 0.1, "weights": 0.1},  # of the loss: one rounding step of bfloat16
}
# Adam divides a gradient by its own size: with its usual eps of 1e-8 the rounding of a single element near 0 decided
# a weight by 1.2e-5 on one processor, where losses and norms agreed to 2e-7 (eps 1e-7: 2.2e-6, 1e-6: 4.4e-7).
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6, "torch_adam": True}},
    "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "width": 32,
    "num_shared": 1,
    "balance_loss": {"weight": 0.01},
    "balance_bias": {"rate": 0.02},
    "z_loss_weight": 0.001,
}
GLOBAL_SCOPE = {"balance_loss": {"weight": 0.01, "scope": "global"}}
NO_OPS = {"num_no_ops": 4, "no_op_fraction": 0.5}
DEPTH = {"capacity_fraction": 0.25, "predictor": {"width": 8}}
VARIANTS: dict[str, dict[str, Any]] = {
    "staged": {"experts": EXPERTS, "depth": DEPTH},
    "integrated": {"experts": EXPERTS | NO_OPS},
    "both": {"experts": EXPERTS | NO_OPS, "depth": DEPTH},
    "both, global scope": {"experts": EXPERTS | NO_OPS | GLOBAL_SCOPE, "depth": DEPTH},
}


@dataclass(frozen=True)
class Case:
    """One layout of one training run."""

    variant: str
    optimizer: str
    precision: str
    ep_size: int
    zero_stage: int
    accumulation: int
    checkpointing: bool = False
    steps: int = 20
    seed: int = 0  # of the data

    def reference(self) -> Case:
        return Case(self.variant, self.optimizer, self.precision, 1, 1, 1, steps=self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a case trained to. On rank 0 only."""

    seed: int
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    dtypes: tuple[dict[str, str], dict[str, str]]  # of parameters and buffers, before and after training
    margin: float  # by how much the closest decision of this rank's last micro-batches was taken


def run_config(case: Case) -> RunConfig:
    variant = VARIANTS[case.variant]
    settings: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": OPTIMIZERS[case.optimizer],
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": case.zero_stage, "reduce_bucket_size": 20000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
        "mode": {
            "model": {
                "vocab_size": VOCABULARY,
                "num_layers": 4,
                "width": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                "ffn_width": 32,
                "sequence_length": LENGTH,
                "activation_checkpointing": case.checkpointing,
            },
            "experts": variant["experts"] | {"ep_size": case.ep_size},
            "depth": variant.get("depth"),
            "train": {"steps": case.steps},
        },
    }
    if case.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    return run_config_from_dict(settings)


def rows(seed: int) -> np.ndarray[Any, Any]:
    """Text-like numbers: some tokens are frequent, and a token says something of the next."""
    generator = np.random.default_rng(seed)
    frequent = generator.zipf(1.3, size=(256, LENGTH)) % VOCABULARY
    return ((frequent + np.roll(frequent, 1, axis=1)) % VOCABULARY).astype(np.uint16)


def train(case: Case) -> Outcome:
    """Trains `case` on the current process group."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    run = run_config(case)
    engine = build_engine(run, build_model(run.mode), world_size)
    before = dtypes(engine.module)
    loader = TrainLoader(rows(case.seed), global_batch_size=BATCH, seed=0)
    losses, norms, margins = [], [], []
    for number in range(case.steps):
        batches = [
            loader.batch(number, rank=rank, world_size=world_size, micro=micro, num_micros=case.accumulation)
            for micro in range(case.accumulation)
        ]
        biases = {name: bias.clone() for name, bias in engine.module.named_buffers()}
        step: Step = optimizer_step(engine, run, batches, device(), lambda losses, inputs: None)
        margins.append(closest_decision(step.routing, biases))
        total = step.losses["total"]
        distributed.all_reduce(total)
        losses.append(total.item() / (world_size * case.accumulation))
        norms.append(step.grad_norm)
    outcome = Outcome(
        case.seed, losses, norms, full_weights(engine.module), (before, dtypes(engine.module)), min(margins)
    )
    engine.destroy()
    for groups in (engine.expert_parallel_group, engine.expert_data_parallel_group):
        for group in list(groups.values()):  # DeepSpeed would take the largest it remembers for the next engine's
            deepspeed.comm.destroy_process_group(group)
    return outcome


def train_without_close_decisions(case: Case) -> Outcome:
    """With the first data seed for which there are none. Half precision has them at any seed."""
    for seed in itertools.count():
        outcome = train(replace(case, seed=seed))
        if outcome.margin >= MARGIN or case.precision != "fp32":
            return outcome
    raise AssertionError


def closest_decision(routing: tuple[BlockRouting, ...], biases: dict[str, Tensor]) -> float:
    """How far the last logit chosen lay above the first one not chosen, at the closest."""
    gaps = []
    for record in routing:
        if record.experts is not None:
            bias_J = biases.get(f"blocks.{record.layer}.body.feed_forward.router.bias_J", 0.0)
            ranked_TJ = (record.experts.logits_TJ.detach() + bias_J).sort(descending=True)
            top_k = record.experts.choices_TK.shape[1]
            real_TJ = ranked_TJ.indices < record.experts.num_experts
            matters_T = real_TJ[:, top_k - 1] | real_TJ[:, top_k]  # which of two no-ops makes no difference
            gaps.append((ranked_TJ.values[:, top_k - 1] - ranked_TJ.values[:, top_k])[matters_T])
        if record.depth is not None:
            ranked_BL = record.depth.logits_BL.detach().sort(descending=True).values
            capacity = record.depth.kept_BS.shape[1]
            gaps.append(ranked_BL[:, capacity - 1] - ranked_BL[:, capacity])
    return min(gap.min().item() for gap in gaps if len(gap))


def dtypes(model: torch.nn.Module) -> dict[str, str]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors}


def full_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """All weights and buffers, gathered from ZeRO's partitions and from the expert-parallel ranks."""
    groups = {
        f"{name}.experts.{part}": module.ep_group
        for name, module in model.named_modules()
        if isinstance(module, MoE)
        for part in ("w1", "w2", "w3")
    }
    weights = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            mine = parameter.detach().float().clone()
        if name in groups:
            parts = [torch.empty_like(mine) for _ in range(distributed.get_world_size(groups[name]))]
            distributed.all_gather(parts, mine, group=groups[name])
            mine = torch.cat(parts)
        weights[name] = mine
    return weights


def differences(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    def largest(ours: list[float], theirs: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))

    weights = max((outcome.weights[name] - theirs).abs().max().item() for name, theirs in reference.weights.items())
    return {
        "loss": largest(outcome.losses, reference.losses),
        "grad_norm": largest(outcome.grad_norms, reference.grad_norms),
        "weights": weights,
    }


# ---- processes ----


def run_cases(cases: list[Case], num_ranks: int, title: str) -> dict[Case, Outcome]:
    """Trains each case on `num_ranks` processes, one after another."""
    found: dict[Case, Outcome] = run_on_ranks(train_cases, num_ranks, cases, title)[0]
    return found


def train_cases(cases: list[Case], title: str) -> dict[Case, Outcome]:
    """On one rank; what they trained to is returned by rank 0 only."""
    start_process_group()
    found: dict[Case, Outcome] = {}
    quiet = distributed.get_rank() != 0
    for case in tqdm(cases, desc=title, disable=quiet or None):
        found[case] = train(case) if distributed.get_world_size() > 1 else train_without_close_decisions(case)
    return {} if quiet else found


# ---- the matrix ----


def matrix(precision: str) -> Iterator[Case]:
    for variant, optimizer in itertools.product(("staged", "integrated", "both"), OPTIMIZERS):
        for ep_size, stage, accumulation in itertools.product((1, 2, 4), STAGES, (1, 2)):
            yield Case(variant, optimizer, precision, ep_size, stage, accumulation)
    for ep_size, stage in itertools.product((1, 2, 4), STAGES):
        yield Case("both, global scope", "AdamW", precision, ep_size, stage, 1)
        yield Case("both", "AdamW", precision, ep_size, stage, 2, checkpointing=True)


def quick(precision: str) -> list[Case]:
    """A sample in which every value of every setting occurs, and every stage with every EP size."""
    variants = itertools.cycle(("both", "staged", "integrated", "both, global scope"))
    optimizers = itertools.cycle(("AdamW", "SGD", "AdamW"))
    cases = []
    for number, (stage, ep_size) in enumerate(itertools.product(STAGES, (1, 2, 4))):
        variant = next(variants)
        accumulation = 1 if "global" in variant else 1 + number % 2
        cases.append(
            Case(variant, next(optimizers), precision, ep_size, stage, accumulation, checkpointing=number % 3 == 0)
        )
    return cases


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each case; a multiple of 4 (default: 4)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each case (default: 20)")
    parser.add_argument("--quick", action="store_true", help="a sample of the matrix instead of all of it")
    parser.add_argument("--write", metavar="FILE", help="write the table there as Markdown")
    parser.add_argument("--json", action="store_true", help="print the figures of every case as JSON")
    options = parser.parse_args(arguments)
    cases = quick(options.precision) if options.quick else list(matrix(options.precision))
    cases = [replace(case, steps=options.steps) for case in cases]
    references = list(dict.fromkeys(case.reference() for case in cases))
    started = time.perf_counter()
    with output_for_figures_alone():
        expected = run_cases(references, 1, "one process")
        cases = [replace(case, seed=expected[case.reference()].seed) for case in cases]
        found = run_cases(cases, options.ranks, f"{options.ranks} ranks")
    results = []
    for case in cases:
        outcome, reference = found[case], expected[case.reference()]
        same_dtypes = outcome.dtypes == reference.dtypes and outcome.dtypes[0] == outcome.dtypes[1]
        results.append({**asdict(case), **differences(outcome, reference), "same_dtypes": same_dtypes})
    wanted = WANTED[options.precision]
    worst = {name: max(result[name] for result in results) for name in wanted}
    passed = all(worst[name] <= limit for name, limit in wanted.items()) and all(r["same_dtypes"] for r in results)
    dtypes_seen = sorted(set(expected[references[0]].dtypes[0].values()))
    summary = {
        "precision": options.precision,
        "ranks": options.ranks,
        "cases": results,
        "worst": worst,
        "wanted": wanted,
        "dtypes": dtypes_seen,
        "closest_decision": min(reference.margin for reference in expected.values()),
        "passed": passed,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary, indent=1) if options.json else table(summary))
    if options.write:
        Path(options.write).write_text(table(summary) + "\n")
    return 0 if passed else 1


def table(summary: dict[str, Any]) -> str:
    """The worst of each (EP, stage), as Markdown."""
    lines = [
        f"{summary['precision']}, {summary['ranks']} ranks against one process, {len(summary['cases'])} cases, "
        f"{summary['cases'][0]['steps']} steps each. Largest difference over variants, optimizers and accumulation; of "
        "losses and gradient norms relative, of weights absolute:",
        "",
        "| EP | ZeRO | cases | loss | gradient norm | weights |",
        "|---|---|---|---|---|---|",
    ]
    keys = sorted({(case["ep_size"], case["zero_stage"]) for case in summary["cases"]})
    for ep_size, stage in keys:
        group = [case for case in summary["cases"] if (case["ep_size"], case["zero_stage"]) == (ep_size, stage)]
        worst = [max(case[name] for case in group) for name in ("loss", "grad_norm", "weights")]
        lines.append(f"| {ep_size} | {stage} | {len(group)} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in summary["wanted"].items())
    verdict = "all hold" if summary["passed"] else "NOT all hold"
    lines += [
        "",
        f"Wanted at most: {wanted}: {verdict}. Dtypes before and after training: {', '.join(summary['dtypes'])}. "
        f"Closest routing decision: {summary['closest_decision']:.1e}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
