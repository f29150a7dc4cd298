"""Where the heads of every block look, on held-out text: at how many tokens, at the one before, at what followed.

A head that looks at what followed an earlier occurrence of its token is how a transformer repeats and continues what it
has read; before it can form, some block below must look at the previous token. A model whose loss does not fall with
the position has none of the former, and these figures tell whether it lacks the latter, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mode.data import Batch
from mode.training.loop.inputs import model_inputs
from mode.transformer.attention import Attend, Attention, Grid
from mode.transformer.model import ModeTransformer

MEASURES = ("entropy", "previous", "repeat")


class Watch:
    """Sums over the looking tokens of one block: those of the second half of each row, which have much to see."""

    def __init__(self, num_heads: int) -> None:
        self.sums = {name: torch.zeros(num_heads, dtype=torch.float64) for name in MEASURES}
        self.tokens = self.visible = self.follows = 0.0

    def add(self, q_SNH: Tensor, k_SGH: Tensor, sees_SS: Tensor, positions_S: Tensor, ids_L: Tensor) -> None:
        """One row; `sees_SS`: which slot may see which."""
        before = positions_S.unsqueeze(0) == positions_S.unsqueeze(1) - 1
        after_the_same = (ids_L[(positions_S - 1).clamp(min=0)] == ids_L[positions_S].unsqueeze(1)) & (positions_S > 0)
        looking = slice(len(positions_S) // 2, None)
        sees, before, repeat = (each[looking] for each in (sees_SS, before & sees_SS, after_the_same & sees_SS))
        for head in range(q_SNH.shape[1]):
            k_SH = k_SGH[:, head * k_SGH.shape[1] // q_SNH.shape[1]]
            logits = (q_SNH[looking, head] @ k_SH.T).double() / math.sqrt(k_SH.shape[-1])
            weights = logits.masked_fill(~sees, -math.inf).softmax(dim=-1)
            self.sums["entropy"][head] += torch.special.entr(weights).sum().item()
            self.sums["previous"][head] += weights[before].sum().item()
            self.sums["repeat"][head] += weights[repeat].sum().item()
        self.tokens += len(sees)
        self.visible += sees.sum().item()
        self.follows += (repeat.sum(dim=1) / sees.sum(dim=1)).sum().item()

    def figures(self) -> dict[str, Any]:
        entropies, previous, repeat = (each / self.tokens for each in self.sums.values())
        return {
            "visible": self.visible / self.tokens,
            "looked_at": entropies.exp().tolist(),  # by head: as many tokens, equally, would have this entropy
            "previous": previous.tolist(),
            "repeat": repeat.tolist(),
            "repeat_by_chance": self.follows / self.tokens,
        }


@torch.no_grad()
def attention_figures(
    model: ModeTransformer, batches: Iterable[Batch], *, causal: bool | str, device: torch.device
) -> dict[str, Any]:
    """By layer, of the heads of each block. `causal` as in the model's forward."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    watches = [Watch(module.num_heads) for module in modules]
    for batch in batches:
        inputs, num_rows = model_inputs(batch, device), int(batch.weights.sum())  # fillers stand at the end
        ids_NL = batch.input_ids[:num_rows].to(device)
        hooks = [
            module.register_forward_pre_hook(partial(_look, watch, ids_NL))
            for module, watch in zip(modules, watches, strict=True)
        ]
        try:
            model(**inputs, causal=causal)
        finally:
            for hook in hooks:
                hook.remove()
    return {str(layer): watch.figures() if watch.tokens else None for layer, watch in enumerate(watches)}


def _look(
    watch: Watch, ids_NL: Tensor, module: Attention, given: tuple[Tensor, Grid, Attend]
) -> tuple[Tensor, Grid, Attend]:
    """Puts a spy in the place of `attend`."""
    x_BSD, grid, attend = given

    def spy(q_BSNH: Tensor, k_BSGH: Tensor, v_BSGH: Tensor, grid: Grid) -> Tensor:
        for row, ids_L in enumerate(ids_NL):
            present = grid.valid_BS
            slots = int(present[row].sum()) if present is not None else q_BSNH.shape[1]
            if slots:
                sees_SS = torch.ones(slots, slots, dtype=torch.bool, device=q_BSNH.device).tril()
                if grid.mask_B1SS is not None:
                    sees_SS = grid.mask_B1SS[row, 0, :slots, :slots]
                positions_S = grid.positions_BS[row, :slots]
                watch.add(q_BSNH[row, :slots], k_BSGH[row, :slots], sees_SS, positions_S, ids_L)
        return attend(q_BSNH, k_BSGH, v_BSGH, grid)

    return x_BSD, grid, spy
