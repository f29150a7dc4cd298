"""Prompts of different lengths as one batch. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mode.config.settings import ModelConfig


@dataclass(frozen=True)
class Prompts:
    """Rows that begin at slot 0, where position 0 is; shorter ones are filled up at the end."""

    ids_BL: Tensor
    lengths_B: Tensor  # int64, on the CPU

    @property
    def present_BL(self) -> Tensor | None:
        """bool, False at fillers; None: there are none."""
        length = self.ids_BL.shape[1]
        if bool((self.lengths_B == length).all()):
            return None
        return (torch.arange(length) < self.lengths_B.unsqueeze(1)).to(self.ids_BL.device)

    @staticmethod
    def from_left_padded(input_ids: Tensor, lengths: Tensor | None) -> Prompts:
        """Of each row of `input_ids` [B, L] the last `lengths` [B] tokens; all without `lengths`."""
        num_rows, length = input_ids.shape
        if lengths is None:
            return Prompts(input_ids, torch.full((num_rows,), length))
        lengths_B = lengths.to("cpu", torch.int64)
        shift_B1 = (length - lengths_B).unsqueeze(1)
        index_BL = (torch.arange(length) + shift_B1).clamp(max=length - 1).to(input_ids.device)
        return Prompts(input_ids.gather(1, index_BL)[:, : int(lengths_B.max())], lengths_B)


def check_prompts(input_ids: Tensor, lengths: Tensor | None, max_new_tokens: int, model: ModelConfig) -> None:
    """Refuses, with a `ValueError`, what cannot be continued."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; it must be [rows, tokens] with at least one of each: "
            "give an empty prompt as the end-of-text token"
        )
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids holds {input_ids.dtype}; it must hold integers, the ids of tokens")
    longest = input_ids.shape[1]
    if lengths is not None:
        if lengths.shape != input_ids.shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
            kind = f"{tuple(lengths.shape)} {lengths.dtype}"
            raise ValueError(f"lengths is {kind}; it must be [rows] integers, one for each of {len(input_ids)} rows")
        for row, count in enumerate(lengths.tolist()):
            if not 1 <= count <= longest:
                raise ValueError(
                    f"lengths[{row}] is {count}; it must be from 1 to the {longest} tokens that input_ids has a row: "
                    "give an empty prompt as the end-of-text token"
                )
        longest = int(lengths.max())
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if longest + max_new_tokens > model.sequence_length:
        room = model.sequence_length - longest
        fix = f"ask for at most {room}, or cut the prompt" if room > 0 else "cut the prompt"
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens = {max_new_tokens} make {longest + max_new_tokens}, more "
            f"than mode.model.sequence_length = {model.sequence_length}, beyond which no position was trained; {fix}"
        )
    lowest, highest = int(input_ids.min()), int(input_ids.max())
    if lowest < 0 or highest >= model.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"input_ids holds the token {wrong}; ids go from 0 to mode.model.vocab_size - 1 = {model.vocab_size - 1}: "
            "use the tokenizer the model was trained with"
        )
