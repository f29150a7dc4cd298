"""The numbers of a survey, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mode.config.settings import ModeConfig

from .survey import Survey

NUM_BINS = 40  # of the histogram of router weights; even, so that 0.5 is an edge


def average_ranks(values: ArrayLike) -> NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(np.asarray(values).ravel(), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Spearman's: the correlation of the ranks. None where one of the two never changes."""
    ranks = average_ranks(first), average_ranks(second)
    if any(np.ptp(each) == 0 for each in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def router_weights(found: Survey) -> dict[int, NDArray[np.float64]]:
    """The sigmoid of the depth routers' logits by layer, all tokens in one list."""
    return {layer: (1 + np.tanh(logits.astype(np.float64).ravel() / 2)) / 2 for layer, logits in found.logits.items()}


def depth_figures(config: ModeConfig, passes: Mapping[str, Survey], shown: str) -> dict[str, Any] | None:
    """Shares of tokens kept in each routed block by every pass, and the router weights of the one that is shown."""
    if config.depth is None:
        return None
    weights = router_weights(passes[shown])
    together = np.concatenate(list(weights.values())) if weights else np.zeros(0)
    counts, edges = np.histogram(together, bins=NUM_BINS, range=(0, 1))
    return {
        "selection": config.depth.selection,
        "capacity_fraction": config.depth.capacity_fraction,
        "above_half": float((together > 0.5).mean()) if weights else None,
        "blocks": {
            str(layer): {
                "kept": {name: float(found.kept_NXL[:, layer].mean()) for name, found in passes.items()},
                "above_half": float((weights[layer] > 0.5).mean()),
                "best_threshold": best_threshold(passes["top_k"].logits[layer], passes["top_k"].kept_NXL[:, layer]),
            }
            for layer in weights
        },
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def best_threshold(logits_NL: NDArray[np.float32], kept_NL: NDArray[np.int64]) -> dict[str, float]:
    """The level of the router's own logit that agrees with these decisions most often: what a token can know alone.

    Not always: top-k keeps the largest of each sequence, and sequences differ.
    """
    logits, kept = logits_NL.ravel(), kept_NL.ravel()
    order = np.argsort(-logits, kind="stable")
    rightly_kept = np.concatenate([[0], np.cumsum(kept[order])])  # with the first n kept, n from none to all
    agree = rightly_kept + (logits.size - np.arange(logits.size + 1)) - (kept.sum() - rightly_kept)
    best = int(agree.argmax())
    return {"logit": float(logits[order[max(best - 1, 0)]]), "agrees": float(agree[best] / logits.size)}


def expert_figures(config: ModeConfig, found: Survey) -> dict[str, Any] | None:
    """The choices of every block, and how unevenly they fall on the real experts. Evaluation drops none of them."""
    experts = config.experts
    if experts is None:
        return None
    blocks = {}
    for layer, choices_J in enumerate(found.choices_XJ):
        load_E = choices_J[: experts.num_experts]
        total, real = int(choices_J.sum()), int(load_E.sum())
        blocks[str(layer)] = {
            "choices": choices_J.tolist(),
            "no_op_share": (total - real) / max(total, 1),
            "mean_gate": float(found.gates_X[layer] / real) if real else None,
            "imbalance": float(load_E.max() / load_E.mean()) if real else None,  # 1: perfectly even
        }
    return {
        "num_experts": experts.num_experts,
        "num_no_ops": experts.num_no_ops,
        "top_k": experts.top_k,
        "no_op_fraction": experts.no_op_fraction,
        "blocks": blocks,
    }


def entropy_figures(config: ModeConfig, found: Survey) -> dict[str, Any]:
    """How the work on a token goes with the entropy of the prediction made from it."""
    counts = {}
    if config.depth is not None:
        counts["blocks"] = found.kept_NXL[:, list(found.logits)].sum(axis=1)
    if config.experts is not None and config.experts.num_no_ops:
        counts["real_choices"] = found.processed_NXL.sum(axis=1)
    return {
        "mean": float(found.entropy_NL.mean()),
        "by": {name: _relation(count_NL, found.entropy_NL) for name, count_NL in counts.items()},
    }


def _relation(count_NL: NDArray[np.int64], entropy_NL: NDArray[np.float64]) -> dict[str, Any]:
    groups = []
    for count in np.unique(count_NL):
        entropies = entropy_NL[count_NL == count]
        low, middle, high = np.percentile(entropies, [25, 50, 75]).tolist()
        groups.append(
            {
                "count": int(count),
                "tokens": int(entropies.size),
                "mean": float(entropies.mean()),
                "quartiles": [low, middle, high],
            }
        )
    return {
        "rank_correlation": rank_correlation(count_NL, entropy_NL),
        "tokens": int(count_NL.size),
        "groups": groups,
    }
