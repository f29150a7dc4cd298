"""One pass of a model over held-out text: what every block did with every token, read from the routers' records.

Shapes: N sequences, X blocks, L tokens, J expert columns. Knows nothing of pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mode.accounting import BlockCounts, block_flops_by_part, head_flops
from mode.config.settings import ModeConfig
from mode.data import Batch
from mode.ops import at_least_float32
from mode.records import BlockRouting, ExpertRouting, flatten, unflatten
from mode.training.loop.inputs import model_inputs
from mode.transformer.model import ModeTransformer

Grid = NDArray[np.int64]


@dataclass(frozen=True)
class Survey:
    ids_NL: Grid
    entropy_NL: NDArray[np.float64]  # nats, of the distribution of the next token
    losses_NL: NDArray[np.float64]  # nats, of predicting the next token; L - 1 wide, as the last one has none
    kept_NXL: Grid  # 1 where the block processed the token
    processed_NXL: Grid  # choices of the token that real experts processed
    no_ops_NXL: Grid  # choices of the token that were no-ops
    logits: dict[int, NDArray[np.float32]]  # [N, L] by layer: the depth router's, of the routed blocks
    choices_XJ: Grid  # how often each expert column was chosen; J is 0 where there are no experts
    gates_X: NDArray[np.float64]  # summed over the choices that real experts processed


@torch.no_grad()
def survey(
    model: ModeTransformer,
    batches: Iterable[Batch],
    *,
    causal: bool | str,
    device: torch.device,
    advance: Callable[[], None],
) -> Survey:
    """`causal` as in the model's forward. Rows that only fill up a batch are left out."""
    parts: list[Survey] = []
    for batch in batches:
        out = model(**model_inputs(batch, device), causal=causal)
        parts.append(_read(batch, out.logits, out.routing))
        advance()
    return Survey(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in BY_SEQUENCE},
        logits={layer: np.concatenate([part.logits[layer] for part in parts]) for layer in parts[0].logits},
        choices_XJ=np.sum([part.choices_XJ for part in parts], axis=0),
        gates_X=np.sum([part.gates_X for part in parts], axis=0),
    )


BY_SEQUENCE = ("ids_NL", "entropy_NL", "losses_NL", "kept_NXL", "processed_NXL", "no_ops_NXL")


def _read(batch: Batch, logits_BLV: Tensor, routing: tuple[BlockRouting, ...]) -> Survey:
    num_rows, length = int(batch.weights.sum()), batch.input_ids.shape[1]  # fillers stand at the end
    kept, processed, no_ops, choice_counts, gates = [], [], [], [], []
    for record in routing:
        tokens_T = flatten(torch.ones_like(record.positions_BS), record.valid_BS)
        kept.append(on_grid(record, tokens_T, length)[:num_rows])
        experts = record.experts
        processed_T = torch.zeros_like(tokens_T) if experts is None else experts.processed_TK.sum(dim=1)
        no_ops_T = (
            torch.zeros_like(tokens_T) if experts is None else (experts.choices_TK >= experts.num_experts).sum(dim=1)
        )
        processed.append(on_grid(record, processed_T, length)[:num_rows])
        no_ops.append(on_grid(record, no_ops_T, length)[:num_rows])
        if experts is not None:
            of_rows = _of_rows(record, experts, num_rows)
            choice_counts.append(of_rows.choice_counts_J())
            gates.append(float(of_rows.sum_of_gates()))
    losses_NL, entropy_NL = _surprise(logits_BLV[:num_rows], batch.input_ids[:num_rows].to(logits_BLV.device))
    none = torch.zeros(len(routing), 0, dtype=torch.int64)
    return Survey(
        batch.input_ids[:num_rows].numpy(),
        entropy_NL.double().cpu().numpy(),
        losses_NL.double().cpu().numpy(),
        torch.stack(kept, dim=1).cpu().numpy(),
        torch.stack(processed, dim=1).cpu().numpy(),
        torch.stack(no_ops, dim=1).cpu().numpy(),
        {
            record.layer: record.depth.logits_BL[:num_rows].float().cpu().numpy()
            for record in routing
            if record.depth is not None
        },
        (torch.stack(choice_counts) if choice_counts else none).cpu().numpy(),
        np.array(gates),
    )


def on_grid(record: BlockRouting, values_T: Tensor, length: int) -> Tensor:
    """[B, length]: a value of every token that entered the block at the token's place, 0 elsewhere."""
    num_rows, slots = record.positions_BS.shape
    grid_BL = values_T.new_zeros(num_rows, length)
    values_BS = unflatten(values_T, (num_rows, slots), record.valid_BS)
    return grid_BL.scatter(1, record.positions_BS, values_BS)  # fillers: other places, zeros


def _of_rows(record: BlockRouting, experts: ExpertRouting, num_rows: int) -> ExpertRouting:
    """The record of the tokens of the first rows."""
    positions_BS = record.positions_BS
    row_BS = torch.arange(len(positions_BS), device=positions_BS.device).unsqueeze(1).expand_as(positions_BS)
    inside_T = flatten(row_BS, record.valid_BS) < num_rows
    tensors = ("logits_TJ", "scores_TJ", "choices_TK", "gates_TK", "processed_TK")
    return replace(experts, **{name: getattr(experts, name)[inside_T] for name in tensors})


def _surprise(logits_BLV: Tensor, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The loss at each position but the last, and the entropy of the predicted distribution at each, in nats."""
    scores_BLV = F.log_softmax(at_least_float32(logits_BLV), dim=-1)
    losses_BL = -scores_BLV[:, :-1].gather(2, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)
    return losses_BL, -(scores_BLV.exp() * scores_BLV).sum(dim=-1)


def token_flops(config: ModeConfig, found: Survey) -> NDArray[np.float64]:
    """[N, L] forward FLOPs spent on each token; over a sequence they sum to those of `mode.accounting`.

    Attention and feed-forward are shared equally by the tokens that entered the block, experts by what they processed,
    routers and head by all tokens.
    """
    num_rows, num_layers, length = found.kept_NXL.shape
    flops_NL = np.full((num_rows, length), head_flops(config, 1, length).forward / length)
    for row in range(num_rows):
        for layer in range(num_layers):
            kept_L, processed_L = found.kept_NXL[row, layer], found.processed_NXL[row, layer]
            kept, processed, no_op = int(kept_L.sum()), int(processed_L.sum()), int(found.no_ops_NXL[row, layer].sum())
            choices = 0 if config.experts is None else kept * config.experts.top_k
            counts = BlockCounts(1, length, kept, kept, processed, no_op, choices - processed - no_op)
            for part, flops in block_flops_by_part(config, layer, counts).items():
                if part in ("depth_router", "predictor"):
                    flops_NL[row] += flops.forward / length
                else:
                    share_L, whole = (processed_L, processed) if part == "experts" else (kept_L, kept)
                    flops_NL[row] += flops.forward * share_L / max(whole, 1)
    return flops_NL


def work(config: ModeConfig, found: Survey, row: int) -> NDArray[np.float64]:
    """[X, L] from 0 (skipped) to 1 (all the block's work): half for attention, half for the choices processed."""
    if config.experts is None:
        return found.kept_NXL[row].astype(np.float64)
    return 0.5 * found.kept_NXL[row] + 0.5 * found.processed_NXL[row] / config.experts.top_k
