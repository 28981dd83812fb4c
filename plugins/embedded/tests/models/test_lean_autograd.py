"""The hand-written gradients, in torch and in C, against torch's own differentiation of the plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from slime_embedded import kernels
from slime_embedded.models.lean_autograd import Linear, attend, rms_norm, rotate, swiglu
from slime_embedded.models.packed import PackedLayout
from slime_embedded.models.rope import apply_rope
from torch.func import functional_call
from torch.nn import functional


@pytest.fixture(autouse=True, params=["auto", "torch"])
def computed_by(request: pytest.FixtureRequest, one_thread: None) -> Iterator[None]:
    kernels.use(request.param)
    assert (kernels.load("training") is None) == (request.param == "torch"), "no C compiler"
    yield
    kernels.use("auto")


def compare(
    ours: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    rtol: float = 1e-5,
) -> None:
    inputs = [x.requires_grad_() for x in inputs]
    expected, found = plain(*inputs), ours(*inputs)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    assert found.dtype == inputs[0].dtype
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, inputs, weight.to(found.dtype)),
        torch.autograd.grad(expected, inputs, weight),
        strict=True,
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=10 * rtol, atol=10 * rtol)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compare(lambda x, w: rms_norm(x, w, 1e-6), plain_rms_norm, [torch.randn(shape), torch.randn(shape[-1])])


def test_rms_norm_of_bfloat16_is_computed_in_float32() -> None:
    x, weight = torch.randn(6, 64).bfloat16(), torch.randn(64)
    expected = plain_rms_norm(x.float(), weight).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_rotation() -> None:
    torch.manual_seed(0)
    angles = torch.randn(5, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    compare(lambda x: rotate(x, cos, sin), lambda x: apply_rope(x, cos, sin), [torch.randn(5, 3, 8)])


def test_swiglu() -> None:
    torch.manual_seed(0)
    compare(swiglu, lambda g, u: functional.silu(g) * u, [6 * torch.randn(6, 10), torch.randn(6, 10)])


def linear(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    module = Linear(*weight.T.shape, bias=bool(bias))
    return functional_call(module, dict(zip(("weight", "bias"), (weight, *bias))), (x,))


@pytest.mark.parametrize(("out", "with_bias"), [(83, False), (83, True), (80, True), (74, False)])
def test_products_of_many_rows(out: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    bias = [torch.randn(out)] if with_bias else []  # no multiple of what is computed at once, and neither are the rows
    compare(linear, functional.linear, [torch.randn(301, 80), torch.randn(out, 80), *bias], rtol=1e-4)


def test_a_product_gives_a_frozen_weight_no_gradient() -> None:
    x, weight = torch.randn(300, 16, requires_grad=True), torch.randn(16, 16)
    linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(300, 16))


@pytest.mark.parametrize("dim", [32, 48])
def test_attention_within_each_sequence(dim: int) -> None:
    torch.manual_seed(0)
    lengths = [35, 5, 49, 16]
    layout, sizes = PackedLayout.build(lengths), (4 * dim, 2 * dim, 2 * dim)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = inputs
        found = attend(q.view(-1, 4, dim), k.view(-1, 2, dim), v, layout, False)
        return plain(*inputs) if found is None else found  # without a compiler torch attends

    def plain(*inputs: torch.Tensor) -> torch.Tensor:
        parts = zip(*(torch.split(x, lengths) for x in inputs))
        each = ([x.view(len(x), -1, dim).transpose(0, 1) for x in part] for part in parts)
        found = [functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in each]
        return torch.cat([x.transpose(0, 1).flatten(1) for x in found])

    compare(ours, plain, [torch.randn(sum(lengths), size) for size in sizes])
