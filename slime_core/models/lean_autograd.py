"""RMSNorm, rotary rotation and SwiGLU with hand-written gradients, for the training-side decoder.

Each computes in its forward what the plain torch expression computes, and saves only its inputs: the plain
expressions keep two to four intermediate copies of the activations alive and spend most of a tiny model's
backward pass in them. Gradients are checked against autograd of the plain expressions. Float32 on one thread of a CPU
is computed by `kernels/training.c`, where that can be compiled.
"""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch.nn import functional

from slime_core import kernels
from slime_core.models.rope import apply_rope


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich, 2019), in the dtype of `x`.

    Args:
        x: [..., n].
        weight: [n].
        eps: Added to the mean square.
    """
    result: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`apply_rope` in the dtype of `x`: [T, heads, head_dim] with `cos`, `sin` [T, head_dim]."""
    result: torch.Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, 2020), elementwise."""
    result: torch.Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


def _library(*tensors: torch.Tensor) -> CDLL | None:
    """The compiled functions, where they take these tensors. They run on one thread, where torch would use all."""
    if torch.get_num_threads() > 1:
        return None
    plain = all(x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)
    return kernels.load("training") if plain else None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # With h = x * r, r = rsqrt(mean(x^2) + eps) and d = grad * weight: dx = r * (d - h * mean(d * h)).
        x32, grad32 = x.float(), grad.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + ctx.eps)
        unit = x32 * scale
        product = grad32 * unit
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = product.matmul(weight.float() / weight.numel()).unsqueeze(-1)
        grad_x = (grad32 * weight).sub_(unit.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return apply_rope(x, cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return apply_rope(grad, cos, -sin).to(grad.dtype), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.library = library = _library(gate, up)
        if library is None:
            return functional.silu(gate).mul_(up)
        out = torch.empty_like(gate)
        library.swiglu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if ctx.library is not None:
            grad = grad.contiguous()
            found = torch.empty_like(gate), torch.empty_like(up)
            ctx.library.swiglu_backward(*(x.data_ptr() for x in (gate, up, grad, *found)), gate.numel())
            return found
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, functional.silu(gate).mul_(grad)
