"""The expert layer: router, experts and what is always on, for tokens in any leading shape.

`LocalMoE` holds all experts and imports no DeepSpeed; `mode.MoE` is the same layer for DeepSpeed's engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mode.config.section import ConfigError
from mode.config.settings import BalanceBiasConfig, BalanceLossConfig, ExpertsConfig
from mode.layers import Initial, SwiGLU
from mode.moe.dispatch import LocalDispatcher
from mode.moe.experts import Mark, ModuleExperts, StackedExperts, build_experts, processes_all
from mode.moe.losses import expert_loss_weights, expert_losses
from mode.moe.router import ExpertRouter
from mode.records import flatten, present_slots, put, unflatten, weighted_sum

# Arguments of deepspeed.moe.layer.MoE that mean nothing here: (the value that changes nothing, what to use instead).
NOT_HERE: dict[str, tuple[Any, str]] = {
    "eval_capacity_factor": (None, "evaluation drops nothing: leave it out"),
    "min_capacity": (None, "the capacity is exactly ceil(capacity_factor * k * tokens / num_experts): leave it out"),
    "use_residual": (False, "use num_shared=1, an expert that every token goes through"),
    "noisy_gate_policy": (None, "selection is deterministic; use bias_rate or balance_weight to spread the choices"),
    "drop_tokens": (False, "capacity_factor=None, the default, drops nothing; a number drops what is beyond it"),
    "use_rts": (False, "over capacity the lowest gates are dropped: leave it out"),
    "use_tutel": (False, 'use backend="auto", which takes the fastest way there is'),
    "enable_expert_tensor_parallelism": (False, "experts are spread whole: use a larger ep_size"),
    "top2_2nd_expert_sampling": (False, "the k best columns are chosen: leave it out"),
}
_layers_made = itertools.count()


class LocalMoE(nn.Module):
    """Mixture of experts with no-op columns, all experts on this rank.

    Positions and names of the first arguments are those of `deepspeed.moe.layer.MoE`. An expert is a copy of `expert`,
    any module from [rows, hidden_size] to the same, or, with `expert_width`, a fast SwiGLU of that width.

    - `k`: choices per token among `num_experts` real experts and `num_no_ops` no-op columns, which contribute exactly
      zero; `no_op_fraction` is the share of choices they should get.
    - `capacity_factor`: None drops nothing; otherwise an expert takes at most ceil(capacity_factor * k * tokens *
      (1 - no_op_fraction) / num_experts) of a rank's assignments in training, those with the largest gates.
    - `renormalize`: whether the gates of a token are divided by their sum; by default where k > 1, as DeepSpeed does.
    - `num_shared`: experts of `expert_width` that every token goes through.
    - `balance_weight`, `balance_scope`: of the balance loss, per "sequence" or over the "global" batch; with the
      default of 1 `l_aux` is on the scale of DeepSpeed's, to be multiplied by the script's own coefficient.
    - `bias_rate`: a selection bias that `mode.after_step` moves toward the target shares.
    - `z_loss_weight`: of the squared log-partition of the router.
    - `backend`: "auto", "megablocks", "native" (compiled for CPUs), "grouped_mm" or "loop".
    - `seed`, `layer`: what the initial weights are drawn from, whatever the layout. Layers with equal numbers begin
      alike; by default they are counted as they are made.
    - `output_scale`: the size of the SwiGLU experts' output for a unit input; 1 / sqrt(2 * layers) suits a residual
      stream.
    - `config`: an `ExpertsConfig` instead of the settings above.
    """

    shared: SwiGLU | None
    experts: StackedExperts | ModuleExperts

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | None = None,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float | None = None,
        *,
        expert_width: int | None = None,
        num_no_ops: int = 0,
        no_op_fraction: float = 0.0,
        renormalize: bool | None = None,
        num_shared: int = 0,
        balance_weight: float = 1.0,
        balance_scope: str = "sequence",
        bias_rate: float | None = None,
        z_loss_weight: float = 0.0,
        backend: str = "auto",
        seed: int = 0,
        layer: int | None = None,
        output_scale: float = 1.0,
        config: ExpertsConfig | None = None,
        **deepspeed_only: Any,
    ) -> None:
        nn.Module.__init__(self)  # by name: the subclass for the engine has a second parent
        _refuse(deepspeed_only)
        if config is None:
            _check_expert(expert, expert_width, num_shared, backend)
            with _argument_names():
                config = ExpertsConfig(
                    num_experts=num_experts,
                    top_k=k,
                    width=1 if expert_width is None else expert_width,  # not read with `expert`
                    num_no_ops=num_no_ops,
                    no_op_fraction=no_op_fraction,
                    capacity_factor=capacity_factor,
                    renormalize=k > 1 if renormalize is None else renormalize,
                    num_shared=num_shared,
                    balance_loss=BalanceLossConfig(balance_weight, balance_scope) if balance_weight else None,
                    balance_bias=None if bias_rate is None else BalanceBiasConfig(bias_rate),
                    z_loss_weight=z_loss_weight,
                    backend=backend,
                    ep_size=ep_size,
                )
        self.config, self.hidden_size = config, hidden_size
        initial = Initial.of_experts(seed, next(_layers_made) if layer is None else layer)
        self.router = ExpertRouter(config, hidden_size, initial.part("router"))
        self.experts = self._build_experts(expert, initial, output_scale)
        shared_width = config.num_shared * config.width
        self.shared = SwiGLU(hidden_size, shared_width, initial.part("shared"), output_scale) if shared_width else None
        self.loss_weights = expert_loss_weights(config)

    def _build_experts(
        self,
        expert: nn.Module | None,
        initial: Initial,
        output_scale: float,
        ep_size: int = 1,
        ep_rank: int = 0,
        mark: Mark | None = None,
    ) -> StackedExperts | ModuleExperts:
        config = self.config
        if expert is None:
            return build_experts(
                config,
                self.hidden_size,
                initial,
                ep_size=ep_size,
                ep_rank=ep_rank,
                output_scale=output_scale,
                mark=mark,
            )
        num_local = config.num_experts // ep_size
        dispatcher = LocalDispatcher(processes_all(config))
        return ModuleExperts(expert, num_local, dispatcher, first=ep_rank * num_local, mark=mark)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(output of the same shape, weighted auxiliary losses, how often each real expert was chosen [E]).

        `hidden_states` [..., D]: the axis before the last is the sequence, for losses per sequence. Where `used_token`
        [...] is False there is no token: it is not routed and its output is zero.
        """
        if not hidden_states.ndim or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states has shape {tuple(hidden_states.shape)}; it must be [..., {self.hidden_size}]"
            )
        *rows, slots = hidden_states.shape[:-1] or (1,)
        shape = (math.prod(rows), slots)
        x_BSD = hidden_states.reshape(*shape, self.hidden_size)
        used_BS = present_slots(x_BSD.shape)
        if used_token is not None:
            if used_token.numel() != math.prod(shape):
                raise ValueError(
                    f"used_token has shape {tuple(used_token.shape)}; it must have one entry for each of the "
                    f"{math.prod(shape)} tokens of hidden_states"
                )
            used_BS = used_token.bool().reshape(shape)
        x_TD = flatten(x_BSD, used_BS)
        routing = self.router(x_TD, shape, used_BS)
        out_TD = self.experts(x_TD, routing)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        losses = expert_losses(self.config, routing) if self.training else {}
        put(self, routing, losses, self.loss_weights, hidden_states.shape)
        output = unflatten(out_TD, shape, used_BS).view_as(hidden_states)
        counts_E = routing.choice_counts_J()[: self.config.num_experts]
        return output, weighted_sum(losses, self.loss_weights, x_TD.device), counts_E


@contextmanager
def _argument_names() -> Iterator[None]:
    """Names a setting that is wrong as the argument of `MoE` is called."""
    names = {
        "top_k": "k",
        "width": "expert_width",
        "weight": "balance_weight",
        "scope": "balance_scope",
        "rate": "bias_rate",
    }
    try:
        yield
    except ConfigError as error:
        raise ConfigError(names.get(error.path, error.path), error.problem) from None


def _refuse(deepspeed_only: dict[str, Any]) -> None:
    for name, value in deepspeed_only.items():
        if name not in NOT_HERE:
            raise TypeError(f"MoE has no argument {name!r}; help(mode.MoE) lists those it has")
        neutral, instead = NOT_HERE[name]
        if value != neutral:
            raise ValueError(f"{name}={value!r} means something to DeepSpeed's MoE and nothing here; {instead}")


def _check_expert(expert: nn.Module | None, expert_width: int | None, num_shared: int, backend: str) -> None:
    if (expert is None) == (expert_width is None):
        given = "neither" if expert is None else "both"
        raise ValueError(
            f"{given} of expert and expert_width given; give expert, any module, or expert_width for SwiGLU experts"
        )
    if backend != "auto" and expert_width is None:
        raise ValueError(f'backend is "{backend}" with expert; it is about SwiGLU experts: leave it out')
    if num_shared and expert_width is None:
        raise ValueError(
            f"num_shared is {num_shared} with expert; shared experts are SwiGLU: give expert_width instead"
        )
