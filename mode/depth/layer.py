"""Depth routing around a block: keep C tokens of every sequence for it, let the rest ride the residual.

`DepthRouted` wraps any block. Our own transformer's routed block shares its base, `DepthLayer`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mode.config.settings import AuxLossConfig, DepthConfig, PredictorConfig
from mode.depth.losses import depth_loss_weights, depth_losses
from mode.depth.router import Routed, build_depth_router
from mode.ops.operators import flat_index
from mode.records import DepthRouting, only_present, only_present_in_backward, put

Axes = int | tuple[int, ...]
# Arguments of transformers' decoder layers that have one entry per token, and where. A mask's axes follow its shape.
HUGGING_FACE: dict[str, Axes] = {"attention_mask": (), "position_ids": 1, "position_embeddings": 1}
CACHES = ("past_key_value", "past_key_values", "layer_past")
_layers_made = itertools.count()


class DepthLayer(nn.Module):
    """A depth router, and adding the gated updates of the tokens that it kept back to the sequence."""

    def __init__(self, config: DepthConfig, width: int, seed: int, layer: int) -> None:
        super().__init__()
        self.depth_config, self.width = config, width
        self.router = build_depth_router(config, width, seed, layer)
        self.depth_loss_weights = depth_loss_weights(config)

    def add_back(self, x_BLD: Tensor, routing: DepthRouting, update_BSD: Tensor) -> Tensor:
        """x + gate * update for the kept tokens; all others are bit-identical copies."""
        gated_BSD = (routing.gates_BS.unsqueeze(-1) * update_BSD).to(x_BLD.dtype)
        if routing.valid_BS is not None:  # adding -0.0 changes no bit
            gated_BSD = gated_BSD.where(routing.valid_BS.unsqueeze(-1), -0.0)
        index_R = flat_index(routing.kept_BS, x_BLD.shape[1]).flatten()  # each token once: deterministic on any device
        return x_BLD.flatten(0, 1).index_add(0, index_R, gated_BSD.flatten(0, 1)).view_as(x_BLD)

    def put_record(self, x_BLD: Tensor, routing: DepthRouting, competing: bool) -> None:
        """Hands the record upward. Losses are for tokens that compete, not for those that decide for themselves."""
        losses = depth_losses(self.depth_config, routing) if competing and self.training else {}
        put(self, routing, losses, self.depth_loss_weights, x_BLD.shape)


class DepthRouted(DepthLayer):
    """Wraps `block(x, ...) -> x'`, or a tuple whose first is x', with x of shape [rows, tokens, hidden_size].

    In training the share `capacity_fraction` of every sequence goes through the block; a kept token becomes
    x + gate * (block(x) - x), a skipped one stays x, bit for bit. In evaluation every token decides for itself, as it
    must in sampling: by the predictor where there is one, otherwise by its router logit > 0.

    - `selection`: "learned" (the largest router logits), "stochastic" (chance, the control) or "token_choice".
    - `gate`: "raw" (the router logit), "sigmoid", "tanh", or "one" (stochastic only).
    - `predictor_width`, `predictor_weight`: a small MLP that learns from the token alone what top-k will keep.
    - `aux_weight`: of a loss that pushes the router's logits above 0 for kept tokens and below 0 for the rest.
    - `balance_weight`: of a loss that holds the share that token choice keeps.
    - `warmup_steps`: optimizer steps, counted by `mode.after_step`, over which the kept share falls from 1 to
      `capacity_fraction`.
    - `per_token`: the block's arguments that have one entry per token, by name, with their axis, or axes (queries,
      keys) as of a mask [rows, 1, tokens, tokens]: {"position_ids": 1, "mask": (2, 3)}. Axis 0 is the rows, or 1 for
      all of them. Tuples of tensors are taken along one by one. `attention_mask` and the decoder layers of
      `transformers` need nothing to be named.
    - `seed`, `layer`: what the router's initial weights are drawn from; by default layers are counted as they are made.
    - `config`: a `DepthConfig` instead of the settings above.

    An `attention_mask` also tells which tokens are padding, which is never kept and takes no capacity: [rows, tokens],
    0 at padding, or [rows, 1, tokens, tokens], True where a token sees another, or floats to be added.

    Rows that keep fewer tokens than others (padding, token choice, evaluation) are filled up with tokens whose output
    is not used. Masks are closed at these fillers: `attention_mask`, and any mask of two axes. A block without a mask
    must look at earlier slots only, as `is_causal=True` does: without padding fillers stand last. A block that masks by
    positions or documents alone would see them: hand it an `attention_mask` of ones, to be combined with.
    """

    steps_done: Tensor | None

    def __init__(
        self,
        block: nn.Module,
        hidden_size: int,
        capacity_fraction: float = 0.125,
        *,
        selection: str = "learned",
        gate: str = "raw",
        predictor_width: int | None = None,
        predictor_weight: float = 0.01,
        aux_weight: float = 0.0,
        balance_weight: float = 0.0,
        causal: str | None = None,
        warmup_steps: int = 0,
        per_token: Mapping[str, Axes] | None = None,
        seed: int = 0,
        layer: int | None = None,
        config: DepthConfig | None = None,
    ) -> None:
        config = config or DepthConfig(
            capacity_fraction=capacity_fraction,
            selection=selection,
            gate=gate,
            predictor=None if predictor_width is None else PredictorConfig(predictor_width, predictor_weight),
            aux_loss=AuxLossConfig(aux_weight) if aux_weight else None,
            balance_weight=balance_weight,
            causal=causal,
        )
        _check_warmup(config, warmup_steps)
        super().__init__(config, hidden_size, seed, next(_layers_made) if layer is None else layer)
        self.block = block
        self.hidden_size, self.warmup_steps = hidden_size, warmup_steps
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.int64) if warmup_steps else None)
        self._steps_done: int | None = 0  # the buffer's value without waiting for a device; None: not known
        self.register_load_state_dict_post_hook(_forget_steps)
        self.names = _argument_names(block)
        self.per_token: dict[str, Axes] = HUGGING_FACE if per_token is None else {"attention_mask": (), **per_token}
        unknown = sorted(set(per_token or ()) - set(self.names)) if "**" not in self.names else []
        if unknown:
            raise ValueError(f"per_token names {unknown[0]!r}, but {type(block).__name__}.forward has {self.names}")
        for name, axes in (per_token or {}).items():
            if not 1 <= len(_tuple(axes)) <= 2 or min(_tuple(axes)) < 1:
                raise ValueError(
                    f"per_token[{name!r}] is {axes}; give the axis of the tokens, or two of a mask (queries, keys), "
                    "counted from 0, which is the rows: 1, or (2, 3)"
                )

    def forward(self, x_BLD: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names[1:], args, strict=False)), **kwargs}
        if x_BLD.ndim != 3 or x_BLD.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x_BLD.shape)}; it must be [rows, tokens, {self.hidden_size}]")
        present_BL = present_tokens(arguments.get("attention_mask"), *x_BLD.shape[:2])
        routing, kept_BSD = self._route(x_BLD, present_BL)
        if not routing.kept_BS.shape[1]:  # many blocks cannot reshape no tokens, and none may be left out under ZeRO-3
            routing, kept_BSD = _one_filler(x_BLD, routing)
        with only_present(routing.valid_BS):
            output = self.block(kept_BSD, **self._of_kept(arguments, routing))
        out_BSD = output[0] if isinstance(output, tuple) else output
        only_present_in_backward(routing.valid_BS, kept_BSD, out_BSD)
        mixed_BLD = self.add_back(x_BLD, routing, out_BSD - kept_BSD)
        self.put_record(x_BLD, routing, competing=self.training)
        return (mixed_BLD, *output[1:]) if isinstance(output, tuple) else mixed_BLD

    def current_capacity_fraction(self) -> Fraction:
        """The share to keep in this step of the warm-up."""
        target = self.router.capacity_fraction
        if self.steps_done is None:
            return target
        if self._steps_done is None:
            self._steps_done = int(self.steps_done)
        done = min(self._steps_done + 1, self.warmup_steps)
        return 1 - (1 - target) * Fraction(done, self.warmup_steps)

    def advance_warmup(self) -> None:
        """Counts one optimizer step."""
        if self.steps_done is not None:
            self.current_capacity_fraction()  # which reads the buffer after a load
            assert self._steps_done is not None
            self._steps_done += 1
            self.steps_done.fill_(self._steps_done)

    def _route(self, x_BLD: Tensor, present_BL: Tensor | None) -> Routed:
        num_rows, length, _ = x_BLD.shape
        if self.training:
            # As dropout: from torch's generator, whose state activation checkpointing restores.
            keys_B = torch.zeros(num_rows, dtype=torch.int64, device=x_BLD.device)
            if self.depth_config.selection == "stochastic":
                keys_B = torch.randint(2**62, (num_rows,), device=x_BLD.device)
            return self.router(x_BLD, keys_B, self.current_capacity_fraction(), present_BL)
        positions_BL = torch.arange(length, device=x_BLD.device).expand(num_rows, -1)
        keys_B = torch.zeros(num_rows, dtype=torch.int64, device=x_BLD.device)
        return self.router.causal(x_BLD, keys_B, positions_BL, self.depth_config.causal_methods[0], present_BL)

    def _of_kept(self, arguments: dict[str, Any], routing: DepthRouting) -> dict[str, Any]:
        """The block's arguments with the entries of the kept tokens."""
        taken = {}
        for name, value in arguments.items():
            if name in CACHES:
                _refuse_cache(name, value, self.training)
                value = None
            elif name == "use_cache":
                value = False
            elif name in self.per_token and value is not None:
                value = _take_along(name, value, self.per_token[name], routing)
            taken[name] = value
        return taken


def _check_warmup(config: DepthConfig, warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; give a number of optimizer steps, or 0 for no warm-up")
    if warmup_steps and config.selection == "token_choice":
        raise ValueError(
            f'warmup_steps is {warmup_steps} with selection "token_choice", whose balance is about one share of the '
            "tokens; set it to 0"
        )
    if config.warmup_fraction:
        raise ValueError(
            f"config.warmup_fraction is {config.warmup_fraction:g}, a share of a run's steps, which a layer does not "
            "know; set it to 0 and give warmup_steps"
        )


def _forget_steps(module: nn.Module, _: object) -> None:
    module._steps_done = None  # type: ignore[assignment]


def _argument_names(block: nn.Module) -> list[str]:
    """The names of the block's arguments, x first; "**" where it takes any."""
    parameters = inspect.signature(block.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names + ["**"] * any(p.kind == p.VAR_KEYWORD for p in parameters)


def _one_filler(x_BLD: Tensor, routing: DepthRouting) -> Routed:
    """One slot per row with no token in it, where nothing is kept."""
    kept_BS = routing.kept_BS.new_zeros(len(x_BLD), 1)
    gates_BS, valid_BS = torch.zeros_like(kept_BS, dtype=routing.gates_BS.dtype), torch.zeros_like(kept_BS).bool()
    return dataclasses.replace(routing, kept_BS=kept_BS, gates_BS=gates_BS, valid_BS=valid_BS), x_BLD[:, :1]


def _tuple(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _refuse_cache(name: str, value: Any, training: bool) -> None:
    """A key/value cache holds one entry per token; the block computes those of the kept ones only."""
    if value is not None and not training:
        raise ValueError(
            f"{name} is given in evaluation, but a depth-routed block keeps keys and values of some tokens only; pass "
            "use_cache=False"
        )


def present_tokens(mask: Any, num_rows: int, length: int) -> Tensor | None:
    """bool [B, L], False at padding: from a mask [B, L], or from which tokens see themselves in one [B, 1, L, L]."""
    if not isinstance(mask, Tensor):
        return None
    shape = tuple(mask.shape)
    if shape == (num_rows, length) and not mask.is_floating_point():
        return mask.bool()
    if len(shape) == 4 and shape[0] in (1, num_rows) and shape[2:] == (length, length):
        itself_BL = mask[:, 0].diagonal(dim1=1, dim2=2).expand(num_rows, -1)
        if mask.dtype == torch.bool:
            return itself_BL
        if mask.is_floating_point():
            return itself_BL > torch.finfo(mask.dtype).min / 2
    raise ValueError(
        f"attention_mask is {mask.dtype} of shape {shape}; depth routing takes [rows, tokens] = [{num_rows}, {length}] "
        "of booleans or integers, 0 at padding, or [rows, 1, tokens, tokens] of booleans, True where a token sees "
        "another, or of floats to be added"
    )


def _take_along(name: str, value: Any, axes: Axes, routing: DepthRouting) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_take_along(name, each, axes, routing) for each in value)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; an argument with one entry per token must be a tensor")
    if axes == ():
        axes = (1,) if value.ndim == 2 else (2, 3)
    axes = _tuple(axes)
    num_rows, length = routing.logits_BL.shape
    for axis in axes:
        if axis >= value.ndim or value.shape[axis] != length or value.shape[0] not in (1, num_rows):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; per_token needs {num_rows} rows, or 1 for all, in its axis 0 "
                f"and {length} tokens in its axis {axis}"
            )
        value = _gather_along(value, axis, routing.kept_BS)
    if routing.valid_BS is None:
        return value
    if len(axes) == 2 and (value.dtype == torch.bool or value.is_floating_point()):
        return _without_fillers(value, axes, routing.valid_BS)
    return value * routing.valid_BS if name == "attention_mask" else value


def _without_fillers(mask: Tensor, axes: tuple[int, ...], valid_BS: Tensor) -> Tensor:
    """A mask (queries, keys) in which no token sees a filler, and fillers see everything.

    A filler must see something: of an empty softmax the gradient is NaN.
    """
    closed, opened = (False, True) if mask.dtype == torch.bool else (torch.finfo(mask.dtype).min, 0.0)
    valid_queries, valid_keys = (_along(valid_BS, axis, mask.ndim) for axis in axes)
    return mask.masked_fill(~valid_keys, closed).masked_fill(~valid_queries, opened)


def _gather_along(value: Tensor, axis: int, kept_BS: Tensor) -> Tensor:
    """The entries of the kept tokens of `value`, whose axis 0 is the rows, or 1 for all rows."""
    value = value.expand(len(kept_BS), *value.shape[1:])
    target = list(value.shape)
    target[axis] = kept_BS.shape[1]
    return value.gather(axis, _along(kept_BS, axis, value.ndim).expand(target))


def _along(x_BS: Tensor, axis: int, num_axes: int) -> Tensor:
    """`x_BS` with its slots in `axis` of `num_axes`, to be broadcast over the others."""
    return x_BS.view([len(x_BS), *[1] * (axis - 1), x_BS.shape[1], *[1] * (num_axes - axis - 1)])
