"""The real experts of a rank: their stacked weights, and the ways to compute them. No-ops own nothing here.

Which way is decided once, at construction. It changes neither parameters nor checkpoints nor, but for rounding,
results.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mode.config.settings import ExpertsConfig
from mode.layers import Initial
from mode.moe.dispatch import LocalDispatcher
from mode.moe.megablocks import MegaBlocksDispatcher, check_megablocks, megablocks_experts
from mode.ops import mix
from mode.ops.library import Unavailable, kernels_unavailable
from mode.ops.operators import KERNEL_DTYPES
from mode.ops.swiglu import grouped_mm_experts, grouped_mm_unavailable, loop_experts
from mode.records import ExpertRouting

Mark = Callable[[nn.Parameter], None]


class StackedExperts(nn.Module):
    """Experts `first` .. `first + num_local - 1`, each a SwiGLU, with one tensor for each of its three weights.

    Expert e draws its initial weights from a key of its own, so they do not depend on how many a rank holds. `mark` is
    called with each parameter before the constructor ends, where ZeRO's `zero.Init` partitions it.
    """

    def __init__(
        self,
        num_local: int,
        width: int,
        hidden_width: int,
        initial: Initial,
        *,
        first: int = 0,
        output_scale: float = 1.0,
        mark: Mark | None = None,
    ) -> None:
        super().__init__()
        self.first, self.widths = first, (width, hidden_width)
        self.w1 = nn.Parameter(torch.empty(num_local, hidden_width, width))
        self.w2 = nn.Parameter(torch.empty(num_local, width, hidden_width))
        self.w3 = nn.Parameter(torch.empty(num_local, hidden_width, width))
        for name, scale in (("w1", 1.0), ("w2", output_scale), ("w3", 1.0)):
            parameter = getattr(self, name)
            for local, weight in enumerate(parameter.data):
                initial.part(name).part(first + local).fill(weight, scale)
            if mark is not None:
                mark(parameter)

    @property
    def num_matrix_weights(self) -> int:
        """Numbers in the matrices of one expert."""
        return 3 * self.widths[0] * self.widths[1]

    def forward(self, x_TD: Tensor, routing: ExpertRouting) -> Tensor:
        """[T, D]: the sum of each token's processed choices, each times its gate."""
        raise NotImplementedError


class FusedExperts(StackedExperts):
    """Gather, products, activation, gates and sum in one operator: a kernel on CPUs. For experts on one rank.

    `kernel_required`: where the kernel cannot be used it is an error, not a reason to use torch's operators.
    """

    def __init__(self, *sizes: Any, kernel_required: bool = False, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.kernel_required = kernel_required

    def forward(self, x_TD: Tensor, routing: ExpertRouting) -> Tensor:
        if self.kernel_required:
            choose_backend("native", x_TD.device, x_TD.dtype, ())
        choices_TK = routing.choices_TK.where(routing.processed_TK, -1)
        return mix(x_TD, choices_TK, routing.gates_TK, self.w1, self.w2, self.w3)


class SortedExperts(StackedExperts):
    """Sorts tokens by expert, on this rank or over several, and computes the rows of each of its experts."""

    def __init__(self, compute: RowExperts, dispatcher: LocalDispatcher, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.compute, self.dispatcher = compute, dispatcher

    def forward(self, x_TD: Tensor, routing: ExpertRouting) -> Tensor:
        sent = self.dispatcher.dispatch(x_TD, routing)
        return self.dispatcher.combine(self.compute(sent.x_QD, sent.counts_e, self.w1, self.w2, self.w3), sent)


class ModuleExperts(nn.Module):
    """Experts of any kind: copies of a module that maps [rows, D] to [rows, D].

    DeepSpeed divides and saves experts as three stacked tensors, so the parameters of a copy lie one behind another in
    these: w1, w2 and w3 hold a third each. The copies begin alike, as DeepSpeed's own do.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter

    def __init__(
        self,
        expert: nn.Module,
        num_local: int,
        dispatcher: LocalDispatcher,
        *,
        first: int = 0,
        mark: Mark | None = None,
    ) -> None:
        super().__init__()
        self.first, self.dispatcher = first, dispatcher
        parameters = dict(expert.named_parameters())
        _check_expert(expert, parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        third = math.ceil(len(flat) / 3)
        parts = torch.cat([flat, flat.new_zeros(3 * third - len(flat))]).split(third)
        for name, part in zip(("w1", "w2", "w3"), parts, strict=True):
            parameter = nn.Parameter(part.expand(num_local, 1, -1).clone())
            self.register_parameter(name, parameter)
            if mark is not None:
                mark(parameter)
        self.template = [_without_weights(expert)]  # in a list: its parameters are not ours

    @property
    def num_matrix_weights(self) -> int:
        """Numbers in the matrices of one expert."""
        return sum(shape.numel() for shape in self.shapes.values() if len(shape) > 1)

    @torch.compiler.disable  # the experts' numbers of rows are new in every pass: it would be compiled again and again
    def forward(self, x_TD: Tensor, routing: ExpertRouting) -> Tensor:
        sent = self.dispatcher.dispatch(x_TD, routing)
        template = self.template[0].train(self.training)
        outputs = []
        rows = sent.x_QD.split(sent.counts_e.tolist())
        for x_XD, *parts in zip(rows, self.w1, self.w2, self.w3, strict=True):
            parameters = self._parameters_of(torch.cat([part[0] for part in parts]))
            out = torch.func.functional_call(template, parameters, (x_XD,))
            outputs.append(out[0] if isinstance(out, tuple) else out)
        return self.dispatcher.combine(torch.cat(outputs), sent)

    def _parameters_of(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = flat[: sum(sizes)].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleExperts:
        self.template[0]._apply(fn)  # for its buffers
        super()._apply(fn, recurse)
        return self


def _without_weights(expert: nn.Module) -> nn.Module:
    """A copy of `expert` whose parameters hold nothing but their names; shared ones stay shared."""
    template = copy.deepcopy(expert)
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(template.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        empty.setdefault(parameter, nn.Parameter(parameter.new_empty(0)))
        setattr(template.get_submodule(owner), last, empty[parameter])
    return template


def _check_expert(expert: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("expert has no parameters; give a module that has some, or expert_width for SwiGLU experts")
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        raise ValueError(f"expert has parameters of {sorted(map(str, dtypes))}; all must have one dtype")
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"expert has the frozen parameter {frozen[0]!r}; an expert's parameters lie in common tensors and are "
            "trained together: make it a non-persistent buffer, or trainable"
        )
    for owner, module in expert.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                raise ValueError(
                    f"expert has the buffer {f'{owner}.{name}'.lstrip('.')!r}, which the layer's checkpoints would not "
                    "hold; register it with persistent=False if it is a constant, or use an expert without it"
                )


# ---- Rows of sorted experts, by backend ----

RowExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def fused_rows(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """Rows that are sorted by expert, as from other ranks: tokens of one choice each."""
    experts_e = torch.arange(len(counts_e), device=counts_e.device)
    experts_Q1 = experts_e.repeat_interleave(counts_e, output_size=len(x_QD)).unsqueeze(1)
    return mix(x_QD, experts_Q1, x_QD.new_ones(len(x_QD), 1), w1_eFD, w2_eDF, w3_eFD)


def auto_rows(x_QD: Tensor, counts_e: Tensor, w1_eFD: Tensor, w2_eDF: Tensor, w3_eFD: Tensor) -> Tensor:
    """For a model that may still move: chosen by the tensors themselves. A trainer chooses once, at its start."""
    name, _ = choose_backend("auto", x_QD.device, x_QD.dtype, tuple(w1_eFD.shape[1:]))
    return ROW_EXPERTS[name](x_QD, counts_e, w1_eFD, w2_eDF, w3_eFD)


ROW_EXPERTS: dict[str, RowExperts] = {
    "auto": auto_rows,
    "megablocks": megablocks_experts,
    "native": fused_rows,
    "grouped_mm": grouped_mm_experts,
    "loop": loop_experts,
}
PREFERENCE = ("megablocks", "native", "grouped_mm", "loop")  # what "auto" tries, in this order


@functools.cache
def choose_backend(name: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> tuple[str, str]:
    """(the backend that the setting `name` stands for in such a model on this machine, why that one).

    `widths` are those of the model and of an expert. Only a setting that names a backend can be refused: a
    `ConfigError`. "auto" always finds one.
    """
    checks = {"megablocks": check_megablocks, "native": check_native}
    if name != "auto":
        if name in checks:
            try:
                checks[name](device, dtype)
            except Unavailable as why:
                raise why.for_setting(name) from why
        return name, "as configured"
    best, reason = ("native", "compiled for this CPU") if device.type == "cpu" else ("megablocks", "it is installed")
    try:
        checks[best](device, dtype)
        return best, reason
    except Unavailable as why:
        no_best = why.reason
    no_grouped_mm = grouped_mm_unavailable(dtype, widths)
    if no_grouped_mm is None:
        return "grouped_mm", no_best
    return "loop", f"{no_best}; {no_grouped_mm}"


def check_native(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, by `Unavailable`, a model that the kernels cannot compute here; compiles them, if they can."""
    if device.type != "cpu":
        raise Unavailable(f"native experts are for CPUs, and this is a {device.type} device", 'use "auto"')
    if dtype not in KERNEL_DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise Unavailable(f"native experts are in float32 or float64 and this model is {name}", 'use "auto"')
    missing = kernels_unavailable()
    if missing is not None:
        raise missing


def processes_all(config: ExpertsConfig) -> bool:
    """Whether every choice is computed: there is no no-op to choose and no capacity to exceed."""
    return config.num_no_ops == 0 and config.capacity_factor is None


def build_experts(
    config: ExpertsConfig,
    width: int,
    initial: Initial,
    *,
    ep_size: int = 1,
    ep_rank: int = 0,
    output_scale: float = 1.0,
    mark: Mark | None = None,
) -> StackedExperts:
    """The SwiGLU experts of rank `ep_rank` of `ep_size`. `mode.moe.deepspeed` connects several ranks."""
    num_local = config.num_experts // ep_size
    sizes = (num_local, width, config.width, initial.part("experts"))
    options: dict[str, Any] = {"first": ep_rank * num_local, "output_scale": output_scale, "mark": mark}
    if ep_size == 1 and config.backend in ("auto", "native"):
        return FusedExperts(*sizes, kernel_required=config.backend == "native", **options)
    # MegaBlocks' own permutation where it fits: with no-ops or a capacity it would copy rows that no expert processes.
    its_own = config.backend == "megablocks" and processes_all(config)
    dispatcher = (MegaBlocksDispatcher if its_own else LocalDispatcher)(processes_all(config))
    return SortedExperts(ROW_EXPERTS[config.backend], dispatcher, *sizes, **options)
