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


def rotate_heads(
    heads_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values) of heads in that order, the first two turned by their tokens' angles."""
    turned: tuple[Tensor, Tensor, Tensor] = _RotateHeads.apply(heads_BSNH, cos_BSH, sin_BSH, num_kv_heads)
    return turned


def route(
    x_TD: Tensor, weight_JD: Tensor, bias_J: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x, to go on with; logits x weight^T; their softmax; the K columns largest with the bias; the scores of those).

    Of equal columns the lower. All uses of x in one, so that backward is one pass over it.
    """
    routed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Route.apply(x_TD, weight_JD, bias_J, top_k)
    return routed


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


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos_BSH, sin_BSH)
        turning, v_BSGH = heads_BSNH[:, :, :-num_kv_heads], heads_BSNH[:, :, -num_kv_heads:]
        turned = torch.ops.deepspeed_mode.rotate(_heads_whole(turning), cos_BSH, sin_BSH)
        return turned[:, :, :-num_kv_heads], turned[:, :, -num_kv_heads:], v_BSGH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_BSNH: Tensor) -> tuple[Tensor, None, None, None]:
        grads = (_heads_whole(grad) for grad in grads_BSNH)
        return torch.ops.deepspeed_mode.rotate_backward(*grads, *ctx.saved_tensors), None, None, None


def _heads_whole(x_BSNH: Tensor) -> Tensor:
    """The numbers of a head must lie side by side; heads and tokens may lie anywhere."""
    return x_BSNH if x_BSNH.stride(3) == 1 else x_BSNH.contiguous()


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_JD: Tensor, bias_J: Tensor | None, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        inputs = x_TD.contiguous(), weight_JD.contiguous()
        bias_J = None if bias_J is None else bias_J.to(x_TD.dtype).contiguous()
        logits_TJ, scores_TJ, choices_TK, gates_TK = torch.ops.deepspeed_mode.route(*inputs, bias_J, top_k)
        ctx.mark_non_differentiable(choices_TK)
        ctx.set_materialize_grads(False)  # without a loss of their own logits and scores have none
        ctx.save_for_backward(*inputs, scores_TJ, choices_TK)
        return x_TD.view_as(x_TD), logits_TJ, scores_TJ, choices_TK, gates_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_TD: Tensor | None,
        grad_logits_TJ: Tensor | None,
        grad_scores_TJ: Tensor | None,
        _: None,
        grad_gates_TK: Tensor | None,
    ) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_JD, scores_TJ, choices_TK = ctx.saved_tensors  # which can be asked for once only
        grad_x_TD, grad_weight_JD = torch.ops.deepspeed_mode.route_backward(
            torch.zeros_like(x_TD) if grad_TD is None else grad_TD.contiguous(),
            scores_TJ.new_zeros(choices_TK.shape) if grad_gates_TK is None else grad_gates_TK.contiguous(),
            None if grad_scores_TJ is None else grad_scores_TJ.contiguous(),
            None if grad_logits_TJ is None else grad_logits_TJ.contiguous(),
            *(x_TD, weight_JD, scores_TJ, choices_TK),
        )
        return grad_x_TD, grad_weight_JD, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, ignored: int) -> Tensor:
        logits_TV, targets_T = logits_TV.contiguous(), targets_T.contiguous()
        losses_T, *for_backward = torch.ops.deepspeed_mode.cross_entropy(logits_TV, targets_T, ignored)
        ctx.save_for_backward(logits_TV, targets_T, *for_backward)
        ctx.ignored = ignored
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        grad_TV = torch.ops.deepspeed_mode.cross_entropy_backward(grad_T.contiguous(), *ctx.saved_tensors, ctx.ignored)
        return grad_TV, None, None
