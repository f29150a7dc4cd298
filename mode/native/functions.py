"""The kernels as differentiable functions, or as parts of such. Each has a twin in torch, where it is used.

They can be differentiated once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mode.native.library import why_not

DTYPES = (torch.float32, torch.float64)


def watched() -> bool:
    """Whether somebody counts, traces or transforms operations, who would not see those of the kernels."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()  # of torch.func
    )


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels can compute with these tensors, here and now."""
    if watched():
        return False
    dtype = tensors[0].dtype
    fit = all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)
    return fit and dtype in DTYPES and why_not() is None


def mix(x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """The sum of every token's chosen experts, each times its gate. Choices that are no expert add nothing."""
    mixed_TD: Tensor = _Mix.apply(x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)
    return mixed_TD


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps)."""
    normed_XD: Tensor = _RMSNorm.apply(x_XD, weight_D, eps)
    return normed_XD


def rotate(x_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor) -> Tensor:
    """Turns each pair (i, i + head_width / 2) of a head by its token's angle."""
    turned_BSNH: Tensor = _Rotate.apply(x_BSNH, cos_BSH, sin_BSH)
    return turned_BSNH


def choose(logits_TJ: Tensor, ranked_TJ: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the softmax of the logits; the K columns that rank highest, of equals the lower; the scores of those)."""
    chosen: tuple[Tensor, Tensor, Tensor] = _Choose.apply(logits_TJ, ranked_TJ, top_k)
    return chosen


def score_backward(grad_TD: Tensor, grad_score_T: Tensor, x_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
    """For scores x . weight: the gradients of x, that of its other uses (`grad_TD`) included, and of weight."""
    inputs = (each.contiguous() for each in (grad_TD, grad_score_T, x_TD, weight_D))
    grads: tuple[Tensor, Tensor] = torch.ops.deepspeed_mode.score_backward(*inputs)
    return grads


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, ignored: int) -> Tensor:
    """[T]: minus the log-probability of every target; 0 where it is `ignored`."""
    losses_T: Tensor = _CrossEntropy.apply(logits_TV, targets_T, ignored)
    return losses_T


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
    ) -> Tensor:
        inputs = [each.contiguous() for each in (x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)]
        mixed_TD, gate_RF, up_RF = torch.ops.deepspeed_mode.mix(*inputs)
        ctx.save_for_backward(*inputs[:3], gate_RF, up_RF, *inputs[3:])
        return mixed_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_TD, grad_gates_TK, *grad_weights = torch.ops.deepspeed_mode.mix_backward(
            grad_TD.contiguous(), *ctx.saved_tensors
        )
        return grad_x_TD, None, grad_gates_TK, *grad_weights


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = x_XD.reshape(-1, x_XD.shape[-1]).contiguous()
        normed_TD, scale_T = torch.ops.deepspeed_mode.rms_norm(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        return normed_TD.view(x_XD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, scale_T = ctx.saved_tensors
        grad_TD = grad_XD.reshape(x_TD.shape).contiguous()
        grad_x_TD, grad_weight_D = torch.ops.deepspeed_mode.rms_norm_backward(grad_TD, x_TD, weight_D, scale_T)
        return grad_x_TD.view(grad_XD.shape), grad_weight_D, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BSH, sin_BSH)
        return torch.ops.deepspeed_mode.rotate(_heads_together(x_BSNH), cos_BSH, sin_BSH, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.deepspeed_mode.rotate(_heads_together(grad_BSNH), *ctx.saved_tensors, True), None, None


def _heads_together(x_BSNH: Tensor) -> Tensor:
    """The heads of a token must lie side by side; a part of wider tokens will do."""
    return x_BSNH if x_BSNH.stride()[2:] == (x_BSNH.shape[3], 1) else x_BSNH.contiguous()


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TJ: Tensor, ranked_TJ: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
        scores_TJ, choices_TK, gates_TK = torch.ops.deepspeed_mode.choose(
            logits_TJ.contiguous(), ranked_TJ.contiguous(), top_k
        )
        ctx.mark_non_differentiable(choices_TK)
        ctx.set_materialize_grads(False)  # mostly nobody but the gates is asked for a gradient
        ctx.save_for_backward(scores_TJ, choices_TK)
        return scores_TJ, choices_TK, gates_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_scores_TJ: Tensor | None, _: None, grad_gates_TK: Tensor | None
    ) -> tuple[Tensor, None, None]:
        scores_TJ, choices_TK = ctx.saved_tensors
        if grad_gates_TK is None:
            grad_gates_TK = scores_TJ.new_zeros(choices_TK.shape)
        grad_scores_TJ = None if grad_scores_TJ is None else grad_scores_TJ.contiguous()
        grad_logits_TJ = torch.ops.deepspeed_mode.choose_backward(
            grad_gates_TK.contiguous(), scores_TJ, choices_TK, grad_scores_TJ
        )
        return grad_logits_TJ, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, ignored: int) -> Tensor:
        logits_TV, targets_T = logits_TV.contiguous(), targets_T.contiguous()
        losses_T, log_sums_T = torch.ops.deepspeed_mode.cross_entropy(logits_TV, targets_T, ignored)
        ctx.save_for_backward(logits_TV, targets_T, log_sums_T)
        ctx.ignored = ignored
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        grad_TV = torch.ops.deepspeed_mode.cross_entropy_backward(grad_T.contiguous(), *ctx.saved_tensors, ctx.ignored)
        return grad_TV, None, None
