"""Projections, RMSNorm, rotary rotation and SwiGLU with hand-written gradients, for the training-side decoder.

Each computes in its forward what the plain torch expression computes, and saves only its inputs: the plain
expressions keep two to four intermediate copies of the activations alive and spend most of a tiny model's
backward pass in them. Gradients are checked against autograd of the plain expressions. Float32 on one thread of a CPU
is computed by `kernels/training.c`, where that can be compiled.
"""

from __future__ import annotations

from ctypes import CDLL
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from slime_embedded.kernels import pointers, training
from slime_embedded.models.packed import PackedLayout
from slime_embedded.models.rope import apply_rope


class Linear(nn.Linear):
    """`nn.Linear` whose products are in C, where many rows make up for packing the matrix first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        library = training(x, self.weight, self.bias, multiplied=True)
        if library is None or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return cast(torch.Tensor, _Product.apply(x, self.weight, self.bias, library))  # type: ignore[no-untyped-call]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang & Sennrich, 2019), in the dtype of `x`.

    Args:
        x: [..., n].
        weight: [n].
        eps: Added to the mean square.
    """
    return cast(torch.Tensor, _Norm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """`apply_rope`, of `rms_norm` where a weight is given: [T, heads, head_dim] with `cos`, `sin` [T, head_dim]."""
    return cast(torch.Tensor, _Norm.apply(x, weight, eps, cos, sin))  # type: ignore[no-untyped-call]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, kept_only: bool
) -> torch.Tensor | None:
    """Causal attention within each sequence without padding; None where it is not compiled.

    Args:
        q: [T, heads, head_dim], rotated.
        k: [T, kv_heads, head_dim], rotated.
        v: [T, kv_heads * head_dim].
        layout: Which row each token of each sequence has.
        kept_only: Only the rows asked for.

    Returns:
        [T or kept rows, heads * head_dim].
    """
    library = training(q, k, v) if q.shape[2] % 16 == 0 else None
    if library is None:
        return None
    return cast(torch.Tensor, _Attend.apply(q, k, v, [layout.tokens[i] for i in (0, 1 + kept_only, 3)], library))  # type: ignore[no-untyped-call]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer, 2020), elementwise."""
    return cast(torch.Tensor, _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        *tensors, ctx.library = given
        x, weight, _ = tensors
        ctx.save_for_backward(x, weight)
        out: torch.Tensor = x.new_empty(len(x), len(weight))
        ctx.library.project(*x.shape, len(weight), *pointers(*tensors, out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), needed, grad = ctx.saved_tensors, ctx.needs_input_grad, grad.contiguous()
        grad_x = torch.empty_like(x) if needed[0] else None
        grad_weight = torch.zeros_like(weight) if needed[1] else None
        ctx.library.project_backward(*x.shape, len(weight), *pointers(x, weight, grad, grad_x, grad_weight))
        return grad_x, grad_weight, grad.sum(0) if needed[2] else None, None


class _Norm(torch.autograd.Function):
    """RMSNorm where there is a weight, then the rotation where there are angles."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, *rope: torch.Tensor
    ) -> torch.Tensor:
        cos, sin = rope or (None, None)
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.none, ctx.library = eps, [None] * len(rope), training(x, weight, *rope)
        if ctx.library is not None:
            out = torch.empty_like(x)
            ctx.library.norm(*pointers(x, weight, cos, sin, out), *_rows(x, cos), eps)
            return out
        if weight is not None:
            x = functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
        return x if cos is None or sin is None else apply_rope(x, cos, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        if ctx.library is not None:
            grad, grad_x = grad.contiguous(), torch.empty_like(x)
            grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            tensors = pointers(x, weight, cos, sin, grad, grad_x, grad_weight)
            ctx.library.norm_backward(*tensors, *_rows(x, cos), ctx.eps)
            return grad_x, grad_weight, None, *ctx.none
        if cos is not None:
            grad = apply_rope(grad, cos, -sin).to(grad.dtype)
        if weight is None:
            return grad, None, None, *ctx.none
        # With h = x * r, r = rsqrt(mean(x^2) + eps) and d = grad * weight: dx = r * (d - h * mean(d * h)).
        x32, grad32 = x.float(), grad.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + ctx.eps)
        unit = x32 * scale
        product = grad32 * unit
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = product.matmul(weight.float() / weight.numel()).unsqueeze(-1)
        grad_x = (grad32 * weight).sub_(unit.mul_(mean)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, *ctx.none


def _rows(x: torch.Tensor, cos: torch.Tensor | None) -> tuple[int, int, int]:
    """Rows, heads of each row that one rotation is for, numbers of each."""
    heads = 1 if cos is None else x.shape[1]
    return x.numel() // x.shape[-1] // heads, heads, x.shape[-1]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: list[torch.Tensor], library: CDLL
    ) -> torch.Tensor:
        heads, dim = q.shape[1:]
        found = int(tokens[1].max()) + 1
        out, lse = q.new_empty(found, heads * dim), q.new_empty(found, heads)
        ctx.library, ctx.tokens, ctx.shape = library, tokens, (len(tokens[2]) - 1, heads, k.shape[1], dim, dim**-0.5)
        library.attend(*pointers(q, k, v, *tokens, out, lse), *ctx.shape)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        ctx.library.attend_backward(*pointers(q, k, v, *ctx.tokens, out, lse, grad, *grads), *ctx.shape)
        return *grads, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.library = library = training(gate, up)
        if library is None:
            return functional.silu(gate).mul_(up)
        out = torch.empty_like(gate)
        library.swiglu(*pointers(gate, up, out), gate.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if ctx.library is not None:
            grad = grad.contiguous()
            found = torch.empty_like(gate), torch.empty_like(up)
            ctx.library.swiglu_backward(*pointers(gate, up, grad, *found), gate.numel())
            return found
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, functional.silu(gate).mul_(grad)
