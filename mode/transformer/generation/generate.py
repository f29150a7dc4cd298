"""The loop that continues prompts: logits, a token for each row, and again.

Knows neither how logits come about (a decoder does) nor how tokens are chosen (`sampling`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mode.depth.noise import keyed_uniform
from mode.transformer.generation.cached import CachedDecoder
from mode.transformer.generation.prompts import Prompts, check_prompts
from mode.transformer.generation.sampling import Sampling, sample
from mode.transformer.generation.uncached import UncachedDecoder

if TYPE_CHECKING:
    from mode.transformer.model import ModeTransformer

Decoder = CachedDecoder | UncachedDecoder


def generate(
    model: ModeTransformer,
    input_ids: Tensor,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    use_cache: bool = True,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    lengths: Tensor | None = None,
    stop_tokens: Collection[int] = (),
    seed: int = 0,
    causal: bool | str = True,
) -> Tensor:
    """`input_ids` followed by the new tokens, [B, L + new]: all that `stream`, which see, gives."""
    tokens = stream(
        model,
        input_ids,
        max_new_tokens,
        Sampling(temperature, top_k, top_p, repetition_penalty),
        use_cache=use_cache,
        lengths=lengths,
        stop_tokens=stop_tokens,
        seed=seed,
        causal=causal,
    )
    return torch.cat([input_ids, *(ids_B.unsqueeze(1) for ids_B in tokens)], dim=1)


def stream(
    model: ModeTransformer,
    input_ids: Tensor,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    *,
    use_cache: bool = True,
    lengths: Tensor | None = None,
    stop_tokens: Collection[int] = (),
    seed: int = 0,
    causal: bool | str = True,
) -> Iterator[Tensor]:
    """The next token of every row, [B] at a time, as they come: `max_new_tokens` times or until every row has ended.

    `input_ids` [B, L]; shorter prompts are padded on the left, with whatever ids, and `lengths` [B] says how many
    tokens at the end of each row are the prompt. Prompt and new tokens must fit into the model's sequence_length.
    A row ends with the first of `stop_tokens`, which then fills it up while others go on.
    `sampling` is greedy by default. Row b draws from seed + b, so a row's tokens depend neither on the other rows nor
    on the cache. `causal`: what tokens decide their depth routing by; True: as depth.causal says.

    The model is in evaluation mode, and so drops nothing, until the iterator is exhausted or closed.
    """
    method = model.causal_method(causal)
    if method is None:
        raise ValueError("causal is False; sampling cannot look at tokens that do not exist yet: leave it out")
    check_prompts(input_ids, lengths, max_new_tokens, model.config.model)
    if not -(2**63) <= seed < 2**63 - len(input_ids):
        raise ValueError(f"seed is {seed}; it must fit, with one more for every row, into 64 bits")
    prompts = Prompts.from_left_padded(input_ids, lengths)
    decoder = (CachedDecoder if use_cache else UncachedDecoder)(model, prompts, method)
    stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=input_ids.device)
    return _tokens(model, decoder, prompts, max_new_tokens, sampling or Sampling(), stops, seed)


def _tokens(
    model: ModeTransformer,
    decoder: Decoder,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    stops: Tensor,
    seed: int,
) -> Iterator[Tensor]:
    was_training = model.training
    model.eval()
    try:
        yield from _loop(decoder, prompts, max_new_tokens, sampling, stops, seed)
    finally:  # also where the caller stops early, or Ctrl-C comes
        model.train(was_training)


def _loop(
    decoder: Decoder, prompts: Prompts, max_new_tokens: int, sampling: Sampling, stops: Tensor, seed: int
) -> Iterator[Tensor]:
    if max_new_tokens == 0:
        return
    device = prompts.ids_BL.device
    tokens_B = torch.zeros(len(prompts.ids_BL), dtype=torch.int64, device=device)
    going_T = torch.arange(len(tokens_B), device=device)  # the rows that have not ended
    logits_TV = decoder.prefill()
    seen_BV = _seen(prompts, logits_TV.shape[1]) if sampling.repetition_penalty != 1 else None
    for number in range(max_new_tokens):
        seen_TV = None if seen_BV is None else seen_BV[going_T]
        ids_T = sample(logits_TV, sampling, keyed_uniform(seed + going_T, number), seen_TV)
        tokens_B = tokens_B.index_put((going_T,), ids_T)  # a new tensor: the last one is the caller's
        yield tokens_B
        if number == max_new_tokens - 1:
            return
        if seen_BV is not None:
            seen_BV[going_T, ids_T] = True
        if len(stops):
            rows_T = (~torch.isin(ids_T, stops)).cpu().nonzero().squeeze(1)  # waits for the device
            if len(rows_T) == 0:
                return
            if len(rows_T) < len(ids_T):
                decoder.keep_rows(rows_T)
                going_T, ids_T = going_T[rows_T.to(device)], ids_T[rows_T.to(device)]
        logits_TV = decoder.step(ids_T)


def _seen(prompts: Prompts, vocab_size: int) -> Tensor:
    """Which tokens each prompt holds, [B, V]; fillers do not count."""
    present_BL = prompts.present_BL
    count_BL = torch.ones_like(prompts.ids_BL) if present_BL is None else present_BL.to(prompts.ids_BL.dtype)
    ids_BL = prompts.ids_BL.to(torch.int64)
    return count_BL.new_zeros(len(ids_BL), vocab_size).scatter_add(1, ids_BL, count_BL) > 0
