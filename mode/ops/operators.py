"""The operators, one after another: the function, its kernel's autograd, and what it computes in torch's operators.

A kernel is compiled C++ (mode/ops/cpu), registered with torch for CPUs alone, with shapes for fake tensors and a FLOP
count (mode/ops/library.py). Whoever compiles or transforms a model gets torch's operators. Kernels can be
differentiated once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mode.ops.library import kernels_unavailable
from mode.ops.rows import at_least_float32, gather_rows, is_functional, sort_by_expert, sum_rows
from mode.ops.swiglu import swiglu_rows

KERNEL_DTYPES = (torch.float32, torch.float64)


def can_use_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels can compute with these tensors, here and now."""
    dtype = tensors[0].dtype
    fit = all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)
    return fit and dtype in KERNEL_DTYPES and not is_transformed() and kernels_unavailable() is None


def is_transformed() -> bool:
    """Whether torch.compile or torch.func is at work, which must see torch's operators."""
    return torch.compiler.is_compiling() or is_functional()


# ---- Experts ----


def mix(x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """The sum of every token's chosen SwiGLU experts, each times its gate. Choices outside of 0 .. E-1 add nothing."""
    gates_TK = gates_TK.to(torch.promote_types(x_TD.dtype, gates_TK.dtype))
    if can_use_kernels(x_TD, gates_TK, w1_EFD):
        mixed_TD: Tensor = _Mix.apply(x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)
        return mixed_TD
    if is_transformed():
        return _mix_densely(x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)
    return mix_sorted(x_TD, choices_TK, gates_TK, w1_EFD, w2_EDF, w3_EFD)


def mix_sorted(
    x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    """`mix` on rows sorted by expert."""
    processed_TK = (choices_TK >= 0) & (choices_TK < len(w1_EFD))
    rows = sort_by_expert(choices_TK, processed_TK, len(w1_EFD))
    gates_R = gates_TK.flatten().index_select(0, rows.assignments_R)
    return sum_rows(swiglu_rows(gather_rows(x_TD, rows), rows.counts_E, w1_EFD, w2_EDF, w3_EFD), gates_R, rows)


def _mix_densely(
    x_TD: Tensor, choices_TK: Tensor, gates_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    """`mix` with every expert on every token: no shape depends on a value, and all of it can be transformed."""
    mixed_TD = torch.zeros_like(x_TD)
    for e, (w1_FD, w2_DF, w3_FD) in enumerate(zip(w1_EFD, w2_EDF, w3_EFD, strict=True)):
        gates_T1 = (gates_TK * (choices_TK == e)).sum(dim=1, keepdim=True)
        hidden_TF = F.silu(F.linear(x_TD, w1_FD)) * F.linear(x_TD, w3_FD)
        mixed_TD = mixed_TD + (gates_T1 * F.linear(hidden_TF, w2_DF)).to(x_TD.dtype)
    return mixed_TD


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


# ---- Expert routers ----


def route(x_TD: Tensor, weight_JD: Tensor, bias_J: Tensor | None, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits x weight^T, their softmax, the K columns largest with the bias [T, K], the scores of those).

    Best first; of equal columns the lower. All in float32 at least, whatever the precision of x.
    """
    if can_use_kernels(x_TD, weight_JD):
        routed: tuple[Tensor, Tensor, Tensor, Tensor] = _Route.apply(x_TD, weight_JD, bias_J, top_k)
        return routed
    with torch.autocast(x_TD.device.type, enabled=False):
        logits_TJ = F.linear(at_least_float32(x_TD), at_least_float32(weight_JD))
    scores_TJ = logits_TJ.softmax(dim=-1)
    ranked_TJ = logits_TJ.detach() if bias_J is None else logits_TJ.detach() + bias_J
    choices_TK = largest_columns(ranked_TJ, top_k)
    return logits_TJ, scores_TJ, choices_TK, scores_TJ.gather(1, choices_TK)


def largest_columns(logits_TJ: Tensor, top_k: int) -> Tensor:
    """The K largest columns of each token, best first; of equals, the lower column.

    By repeated argmax, because `topk` leaves open which of equal values it takes. For few choices
    it is also the faster of the two.
    """
    choices = [logits_TJ.max(dim=-1, keepdim=True).indices]
    for _ in range(top_k - 1):
        logits_TJ = logits_TJ.scatter(1, choices[-1], float("-inf"))
        choices.append(logits_TJ.max(dim=-1, keepdim=True).indices)
    return torch.cat(choices, dim=-1)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_JD: Tensor, bias_J: Tensor | None, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = x_TD.contiguous(), weight_JD.contiguous()
        bias_J = None if bias_J is None else bias_J.to(x_TD.dtype).contiguous()
        logits_TJ, scores_TJ, choices_TK, gates_TK = torch.ops.deepspeed_mode.route(*inputs, bias_J, top_k)
        ctx.mark_non_differentiable(choices_TK)
        ctx.set_materialize_grads(False)  # without a loss of their own logits and scores have none
        ctx.save_for_backward(*inputs, scores_TJ, choices_TK)
        return logits_TJ, scores_TJ, choices_TK, gates_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logits_TJ: Tensor | None, grad_scores_TJ: Tensor | None, _: None, grad_gates_TK: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        x_TD, weight_JD, scores_TJ, choices_TK = ctx.saved_tensors
        grad_x_TD, grad_weight_JD = torch.ops.deepspeed_mode.route_backward(
            scores_TJ.new_zeros(choices_TK.shape) if grad_gates_TK is None else grad_gates_TK.contiguous(),
            None if grad_scores_TJ is None else grad_scores_TJ.contiguous(),
            None if grad_logits_TJ is None else grad_logits_TJ.contiguous(),
            *(x_TD, weight_JD, scores_TJ, choices_TK),
        )
        return grad_x_TD, grad_weight_JD, None, None


# ---- Depth routers ----


def score_and_take(x_BLD: Tensor, weight_1D: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits x . weight [B, L] in float32, the positions of the C largest of each row [B, C], those tokens).

    Positions ascend; of equal logits the earlier is taken. One function, because a pass over all tokens costs a routed
    block as much as computing with some of them, and backward makes one gradient of x for both uses.
    """
    if is_transformed():
        logits_BL = F.linear(at_least_float32(x_BLD), at_least_float32(weight_1D)).squeeze(-1)
        kept_BS = largest(logits_BL, capacity)
        return logits_BL, kept_BS, x_BLD.gather(1, kept_BS.unsqueeze(-1).expand(-1, -1, x_BLD.shape[-1]))
    taken: tuple[Tensor, Tensor, Tensor] = _ScoreAndTake.apply(x_BLD, weight_1D, capacity)
    return taken


def largest(logits_BL: Tensor, capacity: int) -> Tensor:
    """The positions of the `capacity` largest of each row, ascending; of equals, the earlier ones.

    A stable sort, because `topk` leaves open which of equal values it takes.
    """
    order_BL = logits_BL.sort(dim=1, descending=True, stable=True).indices
    return order_BL[:, :capacity].sort(dim=1).values


def flat_index(kept_BS: Tensor, length: int) -> Tensor:
    """Positions within a row as positions within the whole batch."""
    starts_B = length * torch.arange(len(kept_BS), device=kept_BS.device)
    return kept_BS + starts_B.unsqueeze(1)


class _ScoreAndTake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, weight_1D: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x_BLD.device.type, enabled=False):
            logits_BL = F.linear(at_least_float32(x_BLD), at_least_float32(weight_1D)).squeeze(-1)
        kept_BS = largest(logits_BL, capacity)
        index_R = flat_index(kept_BS, x_BLD.shape[1]).flatten()
        kept_BSD = x_BLD.flatten(0, 1).index_select(0, index_R).view(*kept_BS.shape, x_BLD.shape[-1])
        ctx.mark_non_differentiable(kept_BS)
        ctx.save_for_backward(x_BLD, weight_1D, index_R)
        return logits_BL, kept_BS, kept_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_BL: Tensor, _: None, grad_BSD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BLD, weight_1D, index_R = ctx.saved_tensors
        x_TD, grad_logits_T = x_BLD.flatten(0, 1), grad_logits_BL.flatten()
        if can_use_kernels(grad_logits_T, x_TD, weight_1D):
            inputs = (grad_logits_T.contiguous(), x_TD.contiguous(), weight_1D[0].contiguous())
            grad_x_TD, grad_weight_D = torch.ops.deepspeed_mode.score_backward(*inputs)
        else:
            with torch.autocast(x_BLD.device.type, enabled=False):
                grad_x_TD = (grad_logits_T.unsqueeze(1) @ at_least_float32(weight_1D)).to(x_TD.dtype)
                grad_weight_D = (grad_logits_T.unsqueeze(0) @ at_least_float32(x_TD))[0].to(weight_1D.dtype)
        grad_x_TD.index_add_(0, index_R, grad_BSD.flatten(0, 1))
        return grad_x_TD.view_as(x_BLD), grad_weight_D.unsqueeze(0), None


# ---- Norms, rotary positions, cross-entropy ----


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps). On a CPU torch takes ten operations for it, and fifteen in backward."""
    if can_use_kernels(x_XD, weight_D):
        normed_XD: Tensor = _RMSNorm.apply(x_XD, weight_D, eps)
        return normed_XD
    return F.rms_norm(x_XD, weight_D.shape, weight_D, eps)


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


def rotate_heads(
    heads_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values) of heads that lie in that order, the first two turned by their tokens' angles."""
    if can_use_kernels(heads_BSNH, cos_BSH, sin_BSH):
        turned: tuple[Tensor, Tensor, Tensor] = _RotateHeads.apply(heads_BSNH, cos_BSH, sin_BSH, num_kv_heads)
        return turned
    turning, v_BSGH = heads_BSNH[:, :, :-num_kv_heads], heads_BSNH[:, :, -num_kv_heads:]
    turned_BSNH = rotate(turning, cos_BSH, sin_BSH)
    return turned_BSNH[:, :, :-num_kv_heads], turned_BSNH[:, :, -num_kv_heads:], v_BSGH


def rotate(x_BSNH: Tensor, cos_BSH: Tensor, sin_BSH: Tensor) -> Tensor:
    """Turns each pair (i, i + head_width / 2) of a head by its token's angle."""
    cos_BS1H, sin_BS1H = cos_BSH.unsqueeze(2), sin_BSH.unsqueeze(2)
    first, second = x_BSNH.chunk(2, dim=-1)
    return torch.cat([first * cos_BS1H - second * sin_BS1H, second * cos_BS1H + first * sin_BS1H], dim=-1)


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


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, ignored: int) -> Tensor:
    """[T]: minus the log-probability of every target; 0 where it is `ignored`."""
    if can_use_kernels(logits_TV):
        losses_T: Tensor = _CrossEntropy.apply(logits_TV, targets_T, ignored)
        return losses_T
    return F.cross_entropy(logits_TV, targets_T, ignore_index=ignored, reduction="none")


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
