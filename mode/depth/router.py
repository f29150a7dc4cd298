"""Depth routers: which tokens of a sequence a block processes, and with which gate (paper eq. 1).

A router maps x_BLD to a `DepthRouting` and the kept tokens, in two ways: `forward` as in training, where a token
competes with its whole sequence, and `causal`, where each token decides for itself (`decide`), for sampling and
causal evaluation. Knows nothing of the block it routes for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mode.accounting import depth_capacity
from mode.config.settings import DepthConfig, PredictorConfig, exact
from mode.depth.noise import keyed_noise, noise_at
from mode.layers import Initial, Linear, Scorer
from mode.ops import at_least_float32, score_and_take
from mode.ops.operators import largest
from mode.records import DepthRouting

Routed = tuple[DepthRouting, Tensor]  # the record, and the kept tokens [B, S, D]


def raw(logits: Tensor) -> Tensor:
    """The paper's gate: the logit itself."""
    return logits


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": raw,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "one": torch.ones_like,
}


def pack(keep_BL: Tensor) -> tuple[Tensor, Tensor]:
    """A mask as slots: (positions_BS ascending, valid_BS), S the largest count of any row."""
    counts_B = keep_BL.sum(dim=1)
    num_slots = int(counts_B.max()) if len(counts_B) else 0
    order_BL = (~keep_BL).to(torch.uint8).sort(dim=1, stable=True).indices  # kept first, positions ascending
    valid_BS = torch.arange(num_slots, device=keep_BL.device) < counts_B.unsqueeze(1)
    return order_BL[:, :num_slots], valid_BS


def take_tokens(x_BLD: Tensor, kept_BS: Tensor) -> Tensor:
    """[B, S, D]: the tokens at the given positions of every row."""
    return x_BLD.gather(1, kept_BS.unsqueeze(-1).expand(-1, -1, x_BLD.shape[-1]))


class DepthScorer(Scorer):
    """r = w . x, one number per token."""

    def __init__(self, width: int, initial: Initial) -> None:
        super().__init__(width, 1, initial)

    def forward(self, x_BLD: Tensor, capacity: int | None = None) -> tuple[Tensor, ...]:
        """(logits [B, L],) or, with a capacity, also the positions of the largest [B, C] and their tokens."""
        if capacity is None:
            return (self.logits(x_BLD).squeeze(-1),)
        return score_and_take(x_BLD, self.weight, capacity)


class Predictor(nn.Module):
    """A small MLP that predicts from a token alone whether top-k keeps it.

    Behind a stop-gradient: its loss trains it and nothing else.
    """

    def __init__(self, config: PredictorConfig, width: int, initial: Initial) -> None:
        super().__init__()
        self.up = Linear(width, config.width, initial.part("up"), bias=True)
        self.down = Linear(config.width, 1, initial.part("down"), bias=True)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return at_least_float32(self.down(F.silu(self.up(x_BLD.detach()))).squeeze(-1))


@dataclass(frozen=True)
class Decision:
    """What tokens decided for themselves."""

    logits_BL: Tensor  # float32: the router's, from which the gates come
    keep_BL: Tensor  # bool
    predicted_BL: Tensor | None  # float32: the predictor's logits, where it decided


class DepthRouter(nn.Module):
    """What all routers share: the gate, and causal use. `capacity_fraction` is the share of a sequence to keep."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.capacity_fraction = exact(config.capacity_fraction)
        self.gate_name = config.gate

    def gate(self, logits: Tensor) -> Tensor:
        return GATES[self.gate_name](logits)

    def forward(
        self,
        x_BLD: Tensor,
        sample_keys_B: Tensor,
        capacity_fraction: Fraction | None = None,
        present_BL: Tensor | None = None,
    ) -> Routed:
        """Keeps the share `capacity_fraction`, by default its own, of every sequence; never padding."""
        raise NotImplementedError

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """Each token for itself, by `method`: "predictor" or "router"."""
        raise NotImplementedError

    def causal(
        self,
        x_BLD: Tensor,
        sample_keys_B: Tensor,
        positions_BL: Tensor,
        method: str,
        present_BL: Tensor | None = None,
    ) -> Routed:
        """The routing that follows from `decide`. Padding, False in `present_BL`, is never kept."""
        decision = self.decide(x_BLD, sample_keys_B, positions_BL, method)
        keep_BL = decision.keep_BL if present_BL is None else decision.keep_BL & present_BL
        return self._ragged(x_BLD, decision.logits_BL, keep_BL, decision.predicted_BL, present_BL)

    def capacity(self, capacity_fraction: Fraction | None, length: int) -> int:
        return depth_capacity(self.capacity_fraction if capacity_fraction is None else capacity_fraction, length)

    def _ragged(
        self,
        x_BLD: Tensor,
        logits_BL: Tensor,
        keep_BL: Tensor,
        predicted_BL: Tensor | None,
        present_BL: Tensor | None,
    ) -> Routed:
        kept_BS, valid_BS = pack(keep_BL)
        gates_BS = self.gate(logits_BL.gather(1, kept_BS))
        routing = DepthRouting(logits_BL, kept_BS, gates_BS, valid_BS, predicted_BL, present_BL)
        return routing, take_tokens(x_BLD, kept_BS)


def largest_present(ranked_BL: Tensor, capacity: int, present_BL: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`largest` among the tokens that are not padding: (positions_BS, valid_BS; None: all are valid)."""
    if present_BL is None:
        return largest(ranked_BL, capacity), None
    kept_BS = largest(ranked_BL.detach().masked_fill(~present_BL, float("-inf")), capacity)
    return kept_BS, present_BL.gather(1, kept_BS)


class LearnedRouter(DepthRouter):
    """The paper's router: the C largest logits of each sequence, exactly C."""

    def __init__(self, config: DepthConfig, width: int, initial: Initial) -> None:
        super().__init__(config)
        self.scorer = DepthScorer(width, initial.part("scorer"))
        predictor = config.predictor
        self.predictor = None if predictor is None else Predictor(predictor, width, initial.part("predictor"))

    def forward(
        self,
        x_BLD: Tensor,
        sample_keys_B: Tensor,
        capacity_fraction: Fraction | None = None,
        present_BL: Tensor | None = None,
    ) -> Routed:
        capacity = self.capacity(capacity_fraction, x_BLD.shape[1])
        if present_BL is None:
            logits_BL, kept_BS, kept_BSD = self.scorer(x_BLD, capacity)
            valid_BS = None
        else:
            (logits_BL,) = self.scorer(x_BLD)
            kept_BS, valid_BS = largest_present(logits_BL, capacity, present_BL)
            kept_BSD = take_tokens(x_BLD, kept_BS)
        gates_BS = self.gate(logits_BL.gather(1, kept_BS))
        predicted_BL = None if self.predictor is None else self.predictor(x_BLD)
        return DepthRouting(logits_BL, kept_BS, gates_BS, valid_BS, predicted_BL, present_BL), kept_BSD

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """Kept where the predictor or the router itself says so. The gate is the router's either way."""
        (logits_BL,) = self.scorer(x_BLD)
        if method == "router":
            return Decision(logits_BL, logits_BL > 0, None)
        assert self.predictor is not None
        predicted_BL = self.predictor(x_BLD)
        return Decision(logits_BL, predicted_BL > 0, predicted_BL)


class StochasticRouter(DepthRouter):
    """The paper's control: top-k of Gaussian noise. Owns no parameters."""

    def __init__(self, config: DepthConfig, seed: int, layer: int) -> None:
        super().__init__(config)
        self.seed, self.layer = seed, layer

    def forward(
        self,
        x_BLD: Tensor,
        sample_keys_B: Tensor,
        capacity_fraction: Fraction | None = None,
        present_BL: Tensor | None = None,
    ) -> Routed:
        noise_BL = keyed_noise(sample_keys_B, self.seed, self.layer, x_BLD.shape[1])
        kept_BS, valid_BS = largest_present(noise_BL, self.capacity(capacity_fraction, x_BLD.shape[1]), present_BL)
        gates_BS = self.gate(noise_BL.gather(1, kept_BS))
        return DepthRouting(noise_BL, kept_BS, gates_BS, valid_BS, None, present_BL), take_tokens(x_BLD, kept_BS)

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """Kept where the noise is above the level that the kept share of all noise exceeds."""
        noise_BL = noise_at(sample_keys_B, self.seed, self.layer, positions_BL)
        above = float(1 - self.capacity_fraction)
        level = statistics.NormalDist().inv_cdf(above) if above > 0 else float("-inf")
        return Decision(noise_BL, noise_BL > level, None)


class TokenChoiceRouter(DepthRouter):
    """The paper's other scheme: a token enters if its own logit is above 0.

    At most C of a sequence do; over that, the lowest logits stay out, of equals the later ones.
    """

    def __init__(self, config: DepthConfig, width: int, initial: Initial) -> None:
        super().__init__(config)
        self.scorer = DepthScorer(width, initial.part("scorer"))

    def forward(
        self,
        x_BLD: Tensor,
        sample_keys_B: Tensor,
        capacity_fraction: Fraction | None = None,
        present_BL: Tensor | None = None,
    ) -> Routed:
        (logits_BL,) = self.scorer(x_BLD)
        capacity = self.capacity(capacity_fraction, x_BLD.shape[1])
        allowed_BS, _ = largest_present(logits_BL, capacity, present_BL)
        keep_BL = torch.zeros_like(logits_BL, dtype=torch.bool).scatter(1, allowed_BS, True) & (logits_BL > 0)
        keep_BL = keep_BL if present_BL is None else keep_BL & present_BL
        return self._ragged(x_BLD, logits_BL, keep_BL, None, present_BL)

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """As in training without the capacity, which looks at the whole sequence."""
        (logits_BL,) = self.scorer(x_BLD)
        return Decision(logits_BL, logits_BL > 0, None)


def build_depth_router(config: DepthConfig, width: int, seed: int, layer: int) -> DepthRouter:
    if config.selection == "stochastic":
        return StochasticRouter(config, seed, layer)
    initial = Initial.of_block(seed, layer).part("router")
    return (LearnedRouter if config.selection == "learned" else TokenChoiceRouter)(config, width, initial)
