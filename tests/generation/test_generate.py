"""Cached decoding gives what the causal forward pass gives, row by row and token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mode import accounting
from mode.accounting import BlockCounts
from mode.depth.noise import keyed_noise, noise_at
from mode.transformer.generation import Sampling, stream
from mode.transformer.generation.cached import CachedDecoder
from mode.transformer.generation.prompts import Prompts
from mode.transformer.model import ModeTransformer
from tests.helpers import make_config, spread_weights

NO_OPS = {"num_no_ops": 1, "no_op_fraction": 0.25}
PREDICTOR = {"capacity_fraction": 0.5, "predictor": {"width": 8}}
KINDS = {
    "dense": {},
    "moe": {"experts": {}},
    "mod": {"depth": PREDICTOR},
    "mod by the router": {"depth": PREDICTOR | {"causal": "router"}},
    "staged": {"experts": {"num_shared": 1}, "depth": PREDICTOR},
    "integrated": {"experts": NO_OPS | {"capacity_factor": 0.5}},
    "both": {"experts": NO_OPS | {"balance_bias": {}}, "depth": {"aux_loss": {}, "gate": "sigmoid"}},
    "stochastic": {"depth": {"selection": "stochastic", "gate": "one", "capacity_fraction": 0.5}},
    "token choice": {"experts": {}, "depth": {"selection": "token_choice", "gate": "tanh"}},
}
MODEL = {"num_layers": 4, "sequence_length": 96, "qkv_bias": True}
PROMPT_LENGTHS = [7, 1, 12, 4]
IDS = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor(PROMPT_LENGTHS)


def build(kind: str, dtype: torch.dtype = torch.float64, **model: object) -> ModeTransformer:
    """A model whose routers have opinions, in both directions."""
    transformer = ModeTransformer(make_config(model=MODEL | model, **KINDS[kind])).to(dtype)
    return spread_weights(transformer, scale=0.4).eval()


def reference(model: ModeTransformer, prompt: Tensor, num_new: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens and the logits they came from, by whole forward passes of one row."""
    ids, logits = prompt.unsqueeze(0), []
    with torch.no_grad():
        for _ in range(num_new):
            logits.append(model(ids, causal=True).logits[0, -1])
            ids = torch.cat([ids, logits[-1].argmax().view(1, 1)], dim=1)
    return ids[0], torch.stack(logits)


def cached_logits(model: ModeTransformer, prompts: Prompts, new: Tensor) -> tuple[Tensor, CachedDecoder]:
    """[B, new + 1, V]: after the prompts and after each of the given tokens."""
    decoder = CachedDecoder(model, prompts, model.causal_method(True))
    logits = [decoder.prefill(), *(decoder.step(ids) for ids in new.unbind(1))]
    return torch.stack(logits, dim=1), decoder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_cached_logits_and_tokens_are_those_of_the_causal_forward_pass_for_every_row(kind, dtype, tolerance):
    model = build(kind, dtype)
    out = model.generate(IDS, 10, lengths=LENGTHS)
    assert out.shape == (4, 22) and torch.equal(out[:, :12], IDS)
    logits, _ = cached_logits(model, Prompts.from_left_padded(IDS, LENGTHS), out[:, 12:-1])
    for row, length in enumerate(PROMPT_LENGTHS):
        expected_ids, expected_logits = reference(model, IDS[row, 12 - length :], 10)
        torch.testing.assert_close(logits[row], expected_logits, rtol=tolerance, atol=tolerance)
        assert torch.equal(out[row, 12 - length :], expected_ids)
        alone = model.generate(IDS[row : row + 1, 12 - length :], 10)
        assert torch.equal(alone[0], expected_ids), "a batch of one"


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_cache_the_tokens_are_the_same(kind):
    model = build(kind)
    options = {"lengths": LENGTHS, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    first, second = (model.generate(IDS, 6, use_cache=cache, stop_tokens=[1, 2], **options) for cache in (True, False))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_every_cache_holds_the_kept_tokens_and_its_bytes_are_those_of_the_accounting(kind):
    model = build(kind)
    new = torch.randint(40, (4, 70), generator=torch.Generator().manual_seed(1))
    _, decoder = cached_logits(model, Prompts.from_left_padded(IDS, LENGTHS), new)
    totals = []
    for row, length in enumerate(PROMPT_LENGTHS):
        out = model(torch.cat([IDS[row, 12 - length :], new[row]]).unsqueeze(0), causal=True)
        kept = [length + 70 if record.depth is None else int(record.depth.kept_BL().sum()) for record in out.routing]
        assert [int(cache.lengths_B[row]) for cache in decoder.caches] == kept
        totals.append(kept)
    counts = [BlockCounts(4, 82, max(kept), sum(kept)) for kept in zip(*totals, strict=True)]
    assert decoder.num_bytes == accounting.cache_bytes(model.config, counts, element_size=8)
    whole = sum(accounting.block_cache_bytes(model.config, 4, 82, 8) for _ in counts)
    assert accounting.cache_bytes_saved(model.config, counts, 8) == whole - decoder.num_bytes
    if model.config.depth is not None:
        assert len({column[1] for column in totals}) > 1, "rows keep different numbers of tokens"


def test_a_routed_block_computes_only_the_rows_that_keep_their_token_and_nothing_if_none_does():
    model = build("mod")
    entered: list[tuple[int, int]] = []
    for layer, block in enumerate(model.blocks):
        block.body.register_forward_hook(
            lambda module, args, output, layer=layer: entered.append((layer, args[0].shape[0]))
        )
    prompts = Prompts.from_left_padded(IDS, None)
    decoder = CachedDecoder(model, prompts, "predictor")
    decoder.prefill()
    seen = set()
    for ids in torch.randint(40, (30, 4), generator=torch.Generator().manual_seed(2)):
        before = [cache.lengths_B.clone() for cache in decoder.caches]
        entered.clear()
        decoder.step(ids)
        grown = [int((cache.lengths_B - old).sum()) for cache, old in zip(decoder.caches, before, strict=True)]
        assert entered == [(layer, rows) for layer, rows in enumerate(grown) if rows]
        assert grown[0] == grown[2] == 4
        seen |= {grown[1], grown[3]}
    assert {0, 1} < seen, "none, one and several rows were seen"


def test_blocks_that_keep_nothing_or_everything_decode_too():
    for bias in (-99.0, 99.0):
        model = build("mod")
        for block in (model.blocks[1], model.blocks[3]):
            block.router.predictor.down.bias.data.fill_(bias)
        out = model.generate(IDS, 8, lengths=LENGTHS)
        for row, length in enumerate(PROMPT_LENGTHS):
            assert torch.equal(out[row, 12 - length :], reference(model, IDS[row, 12 - length :], 8)[0])


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    ids=st.lists(st.integers(0, 39), min_size=2, max_size=24),
    changed=st.lists(st.integers(0, 39), min_size=1, max_size=24),
    data=st.data(),
)
def test_in_causal_use_no_future_token_changes_a_past_logit(kind, ids, changed, data):
    model = MODELS.setdefault(kind, build(kind))
    cut = data.draw(st.integers(1, len(ids) - 1))
    methods = ("router",) if model.config.depth is None else model.config.depth.causal_methods
    with torch.no_grad():
        for method in methods:
            first, second = (
                model(torch.tensor([row]), causal=method).logits[0, :cut] for row in (ids, ids[:cut] + changed)
            )
            torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


MODELS: dict[str, ModeTransformer] = {}


def test_the_configuration_chooses_what_tokens_decide_by_and_a_caller_may_choose_otherwise():
    by_predictor, by_router = build("mod"), build("mod by the router")
    assert by_predictor.causal_method(True) == "predictor" and by_router.causal_method(True) == "router"
    assert not torch.equal(by_predictor(IDS, causal=True).logits, by_router(IDS, causal=True).logits)
    assert torch.equal(by_predictor(IDS, causal="router").logits, by_router(IDS, causal=True).logits)
    depth = by_router(IDS, causal=True).routing[1].depth
    assert torch.equal(depth.kept_BL(), depth.logits_BL > 0)
    assert torch.equal(by_predictor.generate(IDS, 9, causal="router"), by_router.generate(IDS, 9))
    with pytest.raises(ValueError, match='causal is "predictor"; this model can decide by router'):
        build("both")(IDS, causal="predictor")
    with pytest.raises(ValueError, match="causal is False; sampling cannot look"):
        by_router.generate(IDS, 9, causal=False)


def test_a_row_ends_with_a_stop_token_which_fills_it_up_and_the_others_go_on_as_before():
    model = build("both")
    free = model.generate(IDS, 30, lengths=LENGTHS, temperature=1.0)
    stop = int(free[1, 12 + 5])
    out = model.generate(IDS, 30, lengths=LENGTHS, temperature=1.0, stop_tokens=[stop])
    for row in range(4):
        hits = (free[row, 12:] == stop).nonzero()
        end = int(hits[0]) if len(hits) else out.shape[1] - 12
        assert torch.equal(out[row, 12 : 12 + end], free[row, 12 : 12 + end])
        assert (out[row, 12 + end :] == stop).all()
    everything = model.generate(IDS, 30, stop_tokens=range(40))
    assert everything.shape == (4, 13), "no row goes on after its first token"


def test_a_seed_repeats_and_a_row_draws_from_its_own_whatever_the_batch():
    model = build("staged")
    same = IDS[:1].expand(3, -1)
    first = model.generate(same, 12, temperature=1.0, seed=5)
    assert torch.equal(first, model.generate(same, 12, temperature=1.0, seed=5))
    assert not torch.equal(first, model.generate(same, 12, temperature=1.0, seed=50))
    assert len({tuple(row) for row in first.tolist()}) == 3
    for row in range(3):
        assert torch.equal(first[row], model.generate(same[:1], 12, temperature=1.0, seed=5 + row)[0])
    with pytest.raises(ValueError, match="seed is 9223372036854775807; it must fit"):
        model.generate(same, 12, temperature=1.0, seed=2**63 - 1)


def test_tokens_come_one_by_one_and_the_model_is_as_it_was_however_it_ends():
    model = build("both").train()
    whole = model.generate(IDS, 6)
    assert model.training
    tokens = stream(model, IDS, 6)
    first = next(tokens)
    assert torch.equal(first, whole[:, 12]) and not model.training
    tokens.close()
    assert model.training, "the caller stopped early"
    assert torch.equal(torch.stack(list(stream(model, IDS, 6)), dim=1), whole[:, 12:])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(IDS, 6)
    handle.remove()
    assert model.training
    assert torch.equal(model.generate(IDS, 6), whole), "and it can be used again"


def test_no_new_tokens_are_no_work():
    model = build("dense")
    model.embedding.register_forward_hook(lambda *_: pytest.fail("a forward pass"))
    assert torch.equal(model.generate(IDS, 0), IDS)
    assert list(stream(model, IDS, 0)) == []


def test_prompt_and_new_tokens_may_fill_the_sequence_and_not_exceed_it():
    model = build("mod", sequence_length=16)
    out = model.generate(IDS, 4)
    assert torch.equal(out, model.generate(IDS, 4, use_cache=False)) and out.shape == (4, 16)
    for cache in (True, False):
        with pytest.raises(ValueError, match=r"12 tokens and max_new_tokens = 5 make 17, .*at most 4, or cut"):
            model.generate(IDS, 5, use_cache=cache)
    with pytest.raises(ValueError, match=r"sequence_length = 16, .*; cut the prompt"):
        model.generate(torch.zeros(1, 17, dtype=torch.int64), 1)
    padded = torch.nn.functional.pad(IDS, (20, 0))
    assert torch.equal(model.generate(padded, 4, lengths=torch.full((4,), 12))[:, 32:], out[:, 12:]), "padding is free"


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, r"shape \(1, 0\).*an empty prompt as the end-of-text token"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, r"shape \(0, 3\)"),
        (torch.zeros(3, dtype=torch.int64), {}, r"shape \(3,\)"),
        (torch.zeros(1, 3), {}, "holds torch.float32; it must hold integers"),
        (torch.tensor([[1, 40]]), {}, "holds the token 40; ids go from 0 to mode.model.vocab_size - 1 = 39"),
        (torch.tensor([[1, -1]]), {}, "holds the token -1"),
        (IDS, {"lengths": torch.tensor([1, 0, 1, 1])}, r"lengths\[1\] is 0; it must be from 1 to the 12 tokens"),
        (IDS, {"lengths": torch.tensor([1, 2, 1, 13])}, r"lengths\[3\] is 13"),
        (IDS, {"lengths": torch.tensor([1, 2])}, r"one for each of 4 rows"),
        (IDS, {"max_new_tokens": -1}, "max_new_tokens is -1; it must be at least 0"),
        (IDS, {"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        (IDS, {"temperature": float("nan")}, "temperature is nan"),
        (IDS, {"top_k": 0}, "top_k is 0; it must be at least 1"),
        (IDS, {"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        (IDS, {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ],
)
def test_what_cannot_be_continued_is_a_clear_error(ids, options, message):
    with pytest.raises(ValueError, match=message):
        build("dense").generate(ids, **options)


def test_a_model_spread_over_ranks_is_refused_with_the_cache_and_served_without():
    model = build("staged")
    model.blocks[0].body.feed_forward.experts.w1 = torch.nn.Parameter(torch.zeros(2, 24, 16))
    with pytest.raises(ValueError, match="use_cache is True, but experts.ep_size = 1 spreads this model over ranks"):
        model.generate(IDS, 1)
    model = build("dense")
    model.head.weight.ds_id = 0
    with pytest.raises(ValueError, match="use_cache is True, but ZeRO stage 3"):
        model.generate(IDS, 1)
    model.generate(IDS, 1, use_cache=False)


def test_a_cache_grows_in_chunks_by_its_fullest_row_and_not_before():
    assert [accounting.cache_slots(longest) for longest in (0, 1, 64, 65, 128)] == [0, 64, 64, 128, 128]
    model = build("dense")
    decoder = CachedDecoder(model, Prompts.from_left_padded(IDS, LENGTHS), "router")
    decoder.prefill()
    sizes = []
    for _ in range(53):
        decoder.step(IDS[:, 0])
        sizes.append(decoder.caches[0].keys_BGCH.shape[2])
    assert sizes == [64] * 52 + [128], "the longest prompt has 12 tokens"
    decoder.keep_rows(torch.tensor([1, 3]))
    assert decoder.caches[0].keys_BGCH.shape[0] == 2 and decoder.caches[0].keys_BGCH.shape[2] == 64


def test_noise_does_not_depend_on_where_a_row_is_cut():
    keys, positions = torch.arange(3), torch.tensor([[5], [0], [63]])
    whole = keyed_noise(keys, seed=1, layer=2, length=64)
    assert torch.equal(noise_at(keys, 1, 2, positions), whole.gather(1, positions))


def test_half_precision_decodes_in_its_own_type():
    model = build("both", torch.bfloat16)
    decoder = CachedDecoder(model, Prompts.from_left_padded(IDS, LENGTHS), "router")
    assert decoder.prefill().dtype == decoder.step(IDS[:, 0]).dtype == torch.bfloat16
    assert {cache.keys_BGCH.dtype for cache in decoder.caches} == {torch.bfloat16}


def test_python_calls_per_token_do_not_grow_with_the_context():
    """Operations that one more token takes, counted at two lengths of the context."""
    model = build("dense")
    counts = []
    for length in (3, 90):
        ids = torch.zeros(1, length, dtype=torch.int64)
        decoder = CachedDecoder(model, Prompts.from_left_padded(ids, None), "router")
        decoder.prefill()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            decoder.step(ids[:, 0])
        counts.append(len(profile.events()))
    assert counts[0] == counts[1]


def test_greedy_is_the_default():
    model = build("mod")
    tokens = torch.stack(list(stream(model, IDS, 5)), dim=1)
    assert torch.equal(tokens, torch.stack(list(stream(model, IDS, 5, Sampling())), dim=1))
    assert torch.equal(tokens, model.generate(IDS, 5)[:, 12:])
