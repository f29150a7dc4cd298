"""Depth routers: which tokens of a sequence a block processes, and with which gate (paper eq. 1).

Each router maps x_BLD to a `DepthRouting` and takes the kept tokens, in two ways: `forward` as in training, where a
token competes with its whole sequence, and `causal`, where each token decides for itself (`decide`), for sampling and
causal evaluation. Knows nothing of the block it routes for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mode.accounting import depth_capacity
from mode.config import DepthConfig, PredictorConfig, exact
from mode.depth.noise import keyed_noise, noise_at
from mode.depth.tokens import score_and_take, take_tokens
from mode.layers import Scorer, at_least_float32
from mode.routing import DepthRouting

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda logits: logits,  # the paper's gate
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "one": torch.ones_like,
}


def largest(logits_BL: Tensor, capacity: int) -> Tensor:
    """The positions of the `capacity` largest of each row, ascending; of equals, the earlier ones.

    A stable sort, because `topk` leaves open which of equal values it takes.
    """
    order_BL = logits_BL.sort(dim=1, descending=True, stable=True).indices
    return order_BL[:, :capacity].sort(dim=1).values


def pack(keep_BL: Tensor) -> tuple[Tensor, Tensor]:
    """A mask as slots: (positions_BS ascending, valid_BS), S the largest count of any row."""
    counts_B = keep_BL.sum(dim=1)
    num_slots = int(counts_B.max()) if len(counts_B) else 0
    order_BL = (~keep_BL).to(torch.uint8).sort(dim=1, stable=True).indices  # kept first, positions ascending
    valid_BS = torch.arange(num_slots, device=keep_BL.device) < counts_B.unsqueeze(1)
    return order_BL[:, :num_slots], valid_BS


def keep_none(logits_BL: Tensor) -> Tensor:
    """No position of any row, for whoever wants the logits only."""
    return torch.empty_like(logits_BL[:, :0], dtype=torch.int64)


class DepthScorer(Scorer):
    """r = w . x, one number per token."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(
        self, x_BLD: Tensor, keep: Callable[[Tensor], Tensor] = keep_none
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x, to go on with; the logits [B, L]; which positions `keep` keeps by them [B, S]; the tokens of those)."""
        with torch.autocast(x_BLD.device.type, enabled=False):
            return score_and_take(x_BLD, self.weight, keep)


class Predictor(nn.Module):
    """A small MLP that predicts from a token alone whether top-k keeps it.

    Behind a stop-gradient: its loss trains it and nothing else.
    """

    def __init__(self, config: PredictorConfig, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, config.width)
        self.down = nn.Linear(config.width, 1)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return at_least_float32(self.down(F.silu(self.up(x_BLD.detach()))).squeeze(-1))


@dataclass(frozen=True)
class Decision:
    """What tokens decided for themselves."""

    logits_BL: Tensor  # float32: the router's, from which the gates come
    keep_BL: Tensor  # bool
    predicted_BL: Tensor | None  # float32: the predictor's logits, where it decided


Routed = tuple[Tensor, Tensor, DepthRouting]  # x_BLD, to go on with; the kept tokens kept_BSD; which and why


class DepthRouter(nn.Module):
    """What all routers share: the gate, and causal use."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.kept_fraction = exact(config.capacity_fraction)  # of a sequence; another during a warm-up
        self.gate = GATES[config.gate]

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
        """The routing that follows from `decide`. Fillers, False in `present_BL`, are never kept."""
        decision = self.decide(x_BLD, sample_keys_B, positions_BL, method)
        keep_BL = decision.keep_BL if present_BL is None else decision.keep_BL & present_BL
        return _taken(x_BLD, _ragged(decision.logits_BL, keep_BL, self.gate, decision.predicted_BL))


class LearnedRouter(DepthRouter):
    """The paper's router: the C largest logits of each sequence, exactly C."""

    def __init__(self, config: DepthConfig, width: int) -> None:
        super().__init__(config)
        self.scorer = DepthScorer(width)
        self.predictor = None if config.predictor is None else Predictor(config.predictor, width)

    def forward(self, x_BLD: Tensor, sample_keys_B: Tensor) -> Routed:
        keep = partial(largest, capacity=depth_capacity(self.kept_fraction, x_BLD.shape[1]))
        x_BLD, logits_BL, kept_BS, kept_BSD = self.scorer(x_BLD, keep)
        gates_BS = self.gate(logits_BL.gather(1, kept_BS))
        predicted_BL = None if self.predictor is None else self.predictor(x_BLD)
        return x_BLD, kept_BSD, DepthRouting(logits_BL, kept_BS, gates_BS, None, predicted_BL)

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """Kept where the predictor or the router itself says so. The gate is the router's either way."""
        _, logits_BL, _, _ = self.scorer(x_BLD)
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

    def forward(self, x_BLD: Tensor, sample_keys_B: Tensor) -> Routed:
        noise_BL = keyed_noise(sample_keys_B, self.seed, self.layer, x_BLD.shape[1])
        kept_BS = largest(noise_BL, depth_capacity(self.kept_fraction, x_BLD.shape[1]))
        gates_BS = self.gate(noise_BL.gather(1, kept_BS))
        return _taken(x_BLD, DepthRouting(noise_BL, kept_BS, gates_BS, None, None))

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """Kept where the noise is above the level that the kept share of all noise exceeds."""
        noise_BL = noise_at(sample_keys_B, self.seed, self.layer, positions_BL)
        above = float(1 - self.kept_fraction)
        level = statistics.NormalDist().inv_cdf(above) if above > 0 else float("-inf")
        return Decision(noise_BL, noise_BL > level, None)


class TokenChoiceRouter(DepthRouter):
    """The paper's other scheme: a token enters if its own logit is above 0.

    At most C of a sequence do; over that, the lowest logits stay out, of equals the later ones.
    """

    def __init__(self, config: DepthConfig, width: int) -> None:
        super().__init__(config)
        self.scorer = DepthScorer(width)

    def forward(self, x_BLD: Tensor, sample_keys_B: Tensor) -> Routed:
        x_BLD, logits_BL, _, _ = self.scorer(x_BLD)
        allowed_BS = largest(logits_BL, depth_capacity(self.kept_fraction, x_BLD.shape[1]))
        allowed_BL = torch.zeros_like(logits_BL, dtype=torch.bool).scatter(1, allowed_BS, True)
        return _taken(x_BLD, _ragged(logits_BL, allowed_BL & (logits_BL > 0), self.gate, None))

    def decide(self, x_BLD: Tensor, sample_keys_B: Tensor, positions_BL: Tensor, method: str) -> Decision:
        """As in training without the capacity, which looks at the whole sequence."""
        _, logits_BL, _, _ = self.scorer(x_BLD)
        return Decision(logits_BL, logits_BL > 0, None)


def _ragged(
    logits_BL: Tensor, keep_BL: Tensor, gate: Callable[[Tensor], Tensor], predicted_BL: Tensor | None
) -> DepthRouting:
    kept_BS, valid_BS = pack(keep_BL)
    return DepthRouting(logits_BL, kept_BS, gate(logits_BL.gather(1, kept_BS)), valid_BS, predicted_BL)


def _taken(x_BLD: Tensor, depth: DepthRouting) -> Routed:
    return *take_tokens(x_BLD, depth.kept_BS), depth


def build_depth_router(config: DepthConfig, width: int, seed: int, layer: int) -> DepthRouter:
    if config.selection == "stochastic":
        return StochasticRouter(config, seed, layer)
    return (LearnedRouter if config.selection == "learned" else TokenChoiceRouter)(config, width)
