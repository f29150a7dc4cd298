"""The reference for sampling: the whole causal forward pass again for every token. Slow and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor

from mode.model.transformer import ModeTransformer


@torch.no_grad()
def generate_uncached(
    model: ModeTransformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`input_ids` [B, L] followed by the new tokens. Temperature 0 takes the likeliest token.

    Once the text is longer than the model's sequence, its oldest tokens are forgotten.
    """
    was_training = model.training
    model.eval()
    ids_BL = input_ids
    for _ in range(max_new_tokens):
        window_BL = ids_BL[:, -model.config.model.sequence_length :]
        logits_BV = model(window_BL, causal=True).logits[:, -1].float()
        if temperature == 0:
            next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
        else:
            scores_BV = (logits_BV / temperature).softmax(dim=-1)
            next_B1 = torch.multinomial(scores_BV, 1, generator=generator)
        ids_BL = torch.cat([ids_BL, next_B1], dim=1)
    model.train(was_training)
    return ids_BL
