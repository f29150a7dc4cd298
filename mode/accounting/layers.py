"""What one routed layer of any model cost, from the routes that a batch took through it."""

from __future__ import annotations

from dataclasses import dataclass

from mode.accounting.flops import Flops, predictor_flops, product


@dataclass(frozen=True)
class LayerCosts:
    """The routes through one layer in one forward pass, and what they cost.

    `flops` are by part. Backward is what it takes, if there is one. A depth router's block is not in them, but for
    the expert layers in it, which have costs of their own.
    """

    name: str
    tokens: int  # that reached the layer
    kept: int  # that went on: to the block of a depth router; all of them where the layer holds experts
    real: int  # assignments that an expert processed
    no_op: int  # assignments to a no-op column
    dropped: int  # assignments beyond an expert's capacity
    flops: dict[str, Flops]
    all_to_all_bytes: int  # handed to one all-to-all by this rank; 0 where all experts are on it

    @property
    def total_flops(self) -> Flops:
        return sum(self.flops.values(), Flops())


def expert_layer_costs(
    name: str,
    *,
    tokens: int,
    top_k: int,
    processed: int,
    no_op: int,
    dropped: int,
    width: int,
    num_columns: int,
    expert_weights: int,
    shared_weights: int,
    element_size: int,
    ep_size: int,
) -> LayerCosts:
    """Costs of an expert layer. `expert_weights`: numbers in the matrices of one expert; each is used once per row."""
    if processed + no_op + dropped != tokens * top_k:
        raise ValueError(
            f"{name}: {processed} processed + {no_op} no-op + {dropped} dropped assignments; {tokens} tokens make "
            f"{tokens * top_k}"
        )
    flops = {
        "expert_router": product(2 * tokens * width * num_columns),
        "experts": product(2 * processed * expert_weights),
    }
    if shared_weights:
        flops["shared_experts"] = product(2 * tokens * shared_weights)
    sent = processed * width * element_size if ep_size > 1 else 0
    return LayerCosts(name, tokens, tokens, processed, no_op, dropped, flops, sent)


def depth_layer_costs(
    name: str, *, tokens: int, slots: int, kept: int, width: int, has_scorer: bool, predictor_width: int
) -> LayerCosts:
    """Costs of a depth router. `slots`: tokens and padding, which is scored too; `predictor_width`: 0 without one."""
    if not kept <= tokens <= slots:
        raise ValueError(f"{name}: {kept} kept of {tokens} tokens in {slots} slots")
    flops = {}
    if has_scorer:
        flops["depth_router"] = product(2 * slots * width)
    if predictor_width:
        flops["predictor"] = predictor_flops(slots, width, predictor_width)
    return LayerCosts(name, tokens, kept, 0, 0, 0, flops, 0)
