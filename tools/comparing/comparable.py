"""Whether validation losses are of the same text in the same tokens, and what to say where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mode.config.section import show
from mode.runs import CAUSAL, Run

NATS, BITS = "nats per token", "bits per byte"


@dataclass(frozen=True)
class Comparability:
    unit: str  # of every loss shown
    warnings: list[str]
    problem: str | None  # why a difference of losses means nothing

    def scale(self, run: Run) -> float:
        """What turns a logged loss of the run into the unit."""
        if self.unit == NATS:
            return 1.0
        assert run.bytes_per_token is not None
        return 1 / (math.log(2) * run.bytes_per_token)


def lacks_causal(run: Run) -> bool:
    return run.config.depth is not None and not run.has(CAUSAL)


def judge(runs: Sequence[Run]) -> Comparability:
    text, tokens, rows = (_difference(runs, facts) for facts in (_text(runs), _tokens(runs), _rows))
    warnings = [
        f"{run.directory} is depth-routed and has no {CAUSAL}: shown is its top-k loss, which sees the future; "
        "tools/evaluate.py computes the causal one from a checkpoint"
        for run in runs
        if lacks_causal(run)
    ]
    unit, problem = NATS, None
    if text is not None:
        problem = f"the runs are validated on different text ({text})"
        warnings.append(f"{problem}: a difference of their losses says nothing about the models")
    if tokens is not None:
        about = f"the runs have different tokenizers or vocabularies ({tokens}), so their tokens are not the same"
        if all(run.bytes_per_token is not None for run in runs):
            unit = BITS
            warnings.append(f"{about}: all losses are shown in bits per byte")
        else:
            unknown = f"{about}, and bytes per token are known from checkpoints only, which not all runs have"
            problem = problem or unknown
            warnings.append(unknown)
    if rows is not None:
        warnings.append(f"the runs are validated on different rows of the text ({rows}): compare with care")
    return Comparability(unit, warnings, problem)


Facts = Callable[[Run], dict[str, Any]]


def _text(runs: Sequence[Run]) -> Facts:
    """By what the text holds where every run has written that down, by where it comes from otherwise."""

    def counted(run: Run) -> dict[str, Any]:
        counts = (run.corpus or {}).get("validation", {})
        return {f"validation {name}": counts.get(f"num_{name}") for name in ("documents", "bytes")}

    def configured(run: Run) -> dict[str, Any]:
        data = run.config.data.to_dict()
        names = ("source", "files", "hub", "validation_fraction", "max_documents")
        return {f"mode.data.{name}": data[name] for name in names}

    return counted if all(run.corpus is not None for run in runs) else configured


def _tokens(runs: Sequence[Run]) -> Facts:
    def saved(run: Run) -> dict[str, Any]:
        return {"digest of tokenizer/": (run.tokenizer or "")[:12]}

    def configured(run: Run) -> dict[str, Any]:
        data = run.config.data
        return {
            "mode.data.tokenizer": data.tokenizer,
            "mode.data.pretrained": data.pretrained,
            "mode.model.vocab_size": run.config.model.vocab_size,
        }

    return saved if all(run.tokenizer is not None for run in runs) else configured


def _rows(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "mode.model.sequence_length": config.model.sequence_length,
        "mode.train.eval_sequences": config.train.eval_sequences,
        "mode.data.document_masking": config.data.document_masking,
    }


def _difference(runs: Sequence[Run], facts: Facts) -> str | None:
    """The facts that are not the same in all runs, with their values."""
    found = [facts(run) for run in runs]
    differing = []
    for name in found[0]:
        values = list(dict.fromkeys(show(facts[name]) for facts in found))
        if len(values) > 1:
            differing.append(f"{name}: {' and '.join(values)}")
    return "; ".join(differing) or None
