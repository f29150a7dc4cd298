"""What the routed layers of any model cost: their records as numbers for `mode.accounting`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mode.accounting import LayerCosts, depth_layer_costs, expert_layer_costs
from mode.depth.layer import DepthLayer
from mode.depth.router import LearnedRouter
from mode.moe.layer import LocalMoE
from mode.records import DepthRouting, ExpertRouting, LayerRecord


def routing_costs(records: Iterable[LayerRecord]) -> list[LayerCosts]:
    """Counts, FLOPs and bytes of every layer that `mode.collect_routing` collected from, in their order.

    Tokens, kept tokens, assignments that were processed, no-op or dropped; FLOPs of router, experts, shared experts,
    depth router and predictor; bytes of an all-to-all. All of this rank's batch, on whichever rank it is computed.
    Waits for the device.
    """
    return [_costs(record) for record in records]


def _costs(record: LayerRecord) -> LayerCosts:
    layer, routing = record.layer, record.routing
    if isinstance(layer, LocalMoE) and isinstance(routing, ExpertRouting):
        return _of_experts(record.name, layer, routing)
    assert isinstance(layer, DepthLayer) and isinstance(routing, DepthRouting)
    return _of_depth(record.name, layer, routing)


def _of_experts(name: str, layer: LocalMoE, routing: ExpertRouting) -> LayerCosts:
    processed, no_op, dropped = torch.stack(
        [routing.num_processed(), routing.num_no_op(), routing.num_dropped()]
    ).tolist()
    config = layer.config
    return expert_layer_costs(
        name,
        tokens=len(routing.choices_TK),
        top_k=config.top_k,
        processed=processed,
        no_op=no_op,
        dropped=dropped,
        width=layer.hidden_size,
        num_columns=config.num_columns,
        expert_weights=layer.experts.num_matrix_weights,
        shared_weights=3 * layer.hidden_size * config.num_shared * config.width,
        element_size=layer.experts.w1.element_size(),
        ep_size=getattr(layer, "ep_size", 1),  # a `LocalMoE` holds all experts, whatever its configuration says
    )


def _of_depth(name: str, layer: DepthLayer, routing: DepthRouting) -> LayerCosts:
    router, (num_rows, length) = layer.router, routing.logits_BL.shape
    predictor = router.predictor if isinstance(router, LearnedRouter) else None
    ran = predictor is not None and routing.predicted_BL is not None
    kept, tokens = torch.stack([routing.num_kept(), routing.num_tokens().long()]).tolist()
    return depth_layer_costs(
        name,
        tokens=tokens,
        slots=num_rows * length,
        kept=kept,
        width=layer.width,
        has_scorer=hasattr(router, "scorer"),
        predictor_width=predictor.up.out_features if predictor is not None and ran else 0,
    )
