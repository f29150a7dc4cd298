"""The expert layers that are measured, all with experts of one shape on the same tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any, TypeVar

import torch
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.layer import MoE as DeepSpeedMoE
from torch import Tensor, distributed, nn

from benchmarks.turns import CPU, Contender, why
from mode.config.section import ConfigError
from mode.config.settings import ModeConfig
from mode.layers import Initial, SwiGLU
from mode.moe.deepspeed import MoE
from mode.moe.dispatch import LocalDispatcher
from mode.moe.experts import PREFERENCE, choose_backend
from mode.moe.layer import LocalMoE
from mode.tooling import positive_integer

Layer = TypeVar("Layer", bound=nn.Module)
CAPACITY = 1.25  # of DeepSpeed's own layer: the usual choice


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Where layers are measured, and in which precision."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what is measured (default: cpu)")
        parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="MegaBlocks needs bf16")

    @staticmethod
    def read(options: argparse.Namespace) -> Place:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device", 'is "cuda", and torch sees no such device here; use "cpu"')
        return Place(torch.device(options.device), DTYPES[options.dtype])

    def put(self, layer: Layer) -> Layer:
        return layer.to(self.device, self.dtype)


HERE = Place()


@dataclass(frozen=True)
class Sizes:
    tokens: int = 4096
    width: int = 256
    hidden: int = 512
    experts: int = 8
    top_k: int = 1

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, **defaults: int) -> None:
        for name, default in (vars(Sizes()) | defaults).items():
            parser.add_argument(f"--{name}", type=positive_integer, default=default)

    @staticmethod
    def read(options: argparse.Namespace) -> Sizes:
        return Sizes(**{name: getattr(options, name) for name in vars(Sizes())})

    def least_bytes(self, place: Place, experts: int | None = None) -> int:
        """What forward and backward must at least bring to the processor and back.

        Weights are read twice and their gradients written; of the tokens the inputs and the outputs' gradients are
        read, the outputs and the inputs' gradients written. The dense limit has the weights of `experts` = K.
        """
        weights = 3 * self.width * self.hidden * (self.experts if experts is None else experts)
        return place.dtype.itemsize * (3 * weights + 4 * self.tokens * self.width)

    def tokens_TD(self, seed: int = 0, place: Place = HERE) -> Tensor:
        x_TD = torch.randn(self.tokens, self.width, generator=torch.Generator().manual_seed(seed))
        return x_TD.to(place.device, place.dtype).requires_grad_()


def a_share(text: str) -> float:
    """An argument: a share of the choices that no-ops get."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a number from 0 to below 1")
    return share


def check_choices(sizes: Sizes) -> None:
    if sizes.top_k > sizes.experts:
        raise ConfigError("--experts", f"is {sizes.experts}, fewer than the {sizes.top_k} choices of a token")


def our_config(sizes: Sizes, share: float = 0.0, backend: str = "auto", ep_size: int = 1) -> ModeConfig:
    experts: dict[str, Any] = {
        "num_experts": sizes.experts,
        "top_k": sizes.top_k,
        "width": sizes.hidden,
        "ep_size": ep_size,
        "backend": backend,
    }
    if share:
        # as the shipped configurations have them: a token can take none, and no column is there for nothing
        experts |= {"num_no_ops": sizes.top_k, "no_op_fraction": share, "balance_bias": {}}
    model = {"width": sizes.width, "ffn_width": sizes.hidden, "num_heads": 1, "num_kv_heads": 1}
    model |= {"vocab_size": 8, "num_layers": 1, "sequence_length": 8}
    return ModeConfig.from_dict({"model": model, "experts": experts})


def our_layer(sizes: Sizes, share: float = 0.0, backend: str = "auto") -> LocalMoE:
    """Our layer on one rank. With a `share`, `hold_share` must see the tokens."""
    config = our_config(sizes, share, backend)
    assert config.experts is not None
    return with_weights(LocalMoE(sizes.width, config=config.experts))


def ours(sizes: Sizes, place: Place) -> str:
    """The contender that `experts.backend: auto` stands for there."""
    return f"mode, {choose_backend('auto', place.device, place.dtype, (sizes.width, sizes.hidden))[0]}"


def our_parallel_layer(sizes: Sizes, share: float) -> MoE:
    """Our layer with its experts spread over all ranks."""
    config = our_config(sizes, share, ep_size=distributed.get_world_size())
    assert config.experts is not None
    layer = MoE(sizes.width, config=config.experts)
    layer.set_deepspeed_parallelism()
    return with_weights(layer)


@torch.no_grad()
def hold_share(layer: LocalMoE, share: float, x_TD: Tensor) -> float:
    """Searches the bias of the no-ops that gives them `share` of these tokens' choices; the share that they then have.

    Few tokens may have none near `share`: one has all of its choices or none.
    """
    router = layer.router
    bias_J = router.bias_J
    if bias_J is None:
        return 0.0

    def share_with(bias: float) -> float:
        bias_J[router.config.num_experts :] = bias
        return router(x_TD, (1, len(x_TD))).num_no_op().item() / (len(x_TD) * router.config.top_k)

    low, high = -50.0, 50.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if share_with(middle) < share else (low, middle)
    return share_with(high)  # the least that is enough


def native_layer(sizes: Sizes, capacity_factor: float = CAPACITY) -> DeepSpeedMoE:
    """DeepSpeed's own layer, its experts spread over all ranks."""
    with redirect_stdout(StringIO()):
        layer = DeepSpeedMoE(
            sizes.width,
            SwiGLU(sizes.width, sizes.hidden, Initial(0, "expert")),
            sizes.experts,
            ep_size=distributed.get_world_size(),
            k=sizes.top_k,
            capacity_factor=capacity_factor,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()
    return with_weights(layer)


class AutoEPExperts(nn.Module):
    """DeepSpeed AutoEP's grouped experts between our router and our permutation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = our_layer(sizes).router
        self.dispatcher = LocalDispatcher(all_processed=True)
        self.experts = GroupedExperts(sizes.width, sizes.hidden, sizes.experts)

    def forward(self, x_TD: Tensor) -> tuple[Tensor]:
        sent = self.dispatcher.dispatch(x_TD, self.router(x_TD, (1, len(x_TD))))
        return (self.dispatcher.combine(self.experts(sent.x_QD, sent.counts_e), sent),)


class Mixtral(nn.Module):
    """Hugging Face's block of experts; a row of tokens is a batch of one there."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        self.block = MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=sizes.width,
                intermediate_size=sizes.hidden,
                num_local_experts=sizes.experts,
                num_experts_per_tok=sizes.top_k,
            )
        )

    def forward(self, x_TD: Tensor) -> tuple[Tensor, None]:
        out = self.block(x_TD.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0), None


class Dense(nn.Module):
    """One SwiGLU of the FLOPs of all K choices: the limit."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.swiglu = SwiGLU(sizes.width, sizes.top_k * sizes.hidden, Initial(0, "dense"))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, None]:
        return self.swiglu(x_TD), None


@torch.no_grad()
def with_weights(layer: Layer) -> Layer:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return layer


def training_contender(name: str, layer: nn.Module, x_TD: Tensor) -> Contender:
    """Forward and backward of a layer, to the gradients of its input and weights."""

    direction_TD = torch.randn_like(x_TD)

    def run() -> None:
        layer(x_TD)[0].backward(direction_TD)

    def reset() -> None:
        layer.zero_grad(set_to_none=True)
        x_TD.grad = None

    return Contender(name, run, reset)


def expert_contenders(sizes: Sizes, share: float, place: Place) -> tuple[list[Contender], dict[str, str], float]:
    """All that can run there; why the others cannot; the no-op share of the one that has no-ops."""
    x_TD = sizes.tokens_TD(place=place)
    held = 0.0

    def with_no_ops() -> LocalMoE:
        nonlocal held
        layer = place.put(our_layer(sizes, share))
        held = hold_share(layer, share, x_TD.detach())
        return layer

    makers: dict[str, Callable[[], nn.Module]] = {
        **{f"mode, {backend}": partial(our_layer, sizes, backend=backend) for backend in PREFERENCE},
        f"mode, no-op share {share:g}": with_no_ops,
        "deepspeed.moe.layer.MoE": partial(native_layer, sizes),
        "deepspeed AutoEP experts": lambda: with_weights(AutoEPExperts(sizes)),
        "transformers Mixtral": lambda: with_weights(Mixtral(sizes)),
        "dense SwiGLU": lambda: with_weights(Dense(sizes)),
    }
    contenders, absent = [], {}
    for name, make in makers.items():
        try:
            contender = training_contender(name, place.put(make()), x_TD)
            contender.run()
            contenders.append(contender)
        except Exception as error:  # somebody else's code: whatever it raises is what is reported
            absent[name] = why(error)
    return contenders, absent, held
