from __future__ import annotations

import pytest
import torch
from slime_models.qwen3_next.delta_rule import causal_conv, gated_delta_rule
from torch import Tensor
from torch.nn import functional


def inputs(tokens: int, *, heads: int = 3, key_dim: int = 8, value_dim: int = 6, decay: float = 1.0) -> list[Tensor]:
    """Query, key, value, decay, beta."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, key_dim), (heads, key_dim), (heads, value_dim))
    vectors = [torch.randn(tokens, *shape, generator=generator) for shape in shapes]
    numbers = [torch.rand(tokens, heads, generator=generator) for _ in range(2)]
    return [*vectors, -decay * numbers[0], numbers[1]]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is written, one sequence, in float64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(key.shape[1], key.shape[2], value.shape[2], dtype=torch.float64)
    outputs = []
    for t in range(len(query)):
        state = state * decay[t].exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", key[t], state)
        state = state + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * (value[t] - read))
        outputs.append(torch.einsum("hk,hkv->hv", query[t] * query.shape[-1] ** -0.5, state))
    return torch.stack(outputs)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.1, 8.0])
def test_chunks_are_the_rule_token_by_token(tokens: int, decay: float) -> None:
    given = inputs(tokens, decay=decay)
    torch.testing.assert_close(gated_delta_rule(*given, [tokens]).double(), token_by_token(*given), rtol=0, atol=1e-5)
    exact = gated_delta_rule(*(x.double() for x in given), [tokens])
    torch.testing.assert_close(exact, token_by_token(*given), rtol=0, atol=1e-12)


def test_it_is_transformers_kernel() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    query, key, value, decay, beta = (x[None] for x in inputs(150))
    expected, _ = torch_chunk_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(*inputs(150), [150]), expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[130, 3, 0, 64, 1, 200], [5, 70], [64, 64], [0], []])
def test_packed_sequences_are_separate_ones(lengths: list[int]) -> None:
    given = inputs(sum(lengths))
    packed = gated_delta_rule(*given, lengths)
    assert packed.shape == given[2].shape
    pieces = zip(*(x.split(lengths) for x in given), strict=True)
    separate = [gated_delta_rule(*piece, [len(piece[0])]) for piece in pieces]
    torch.testing.assert_close(packed, torch.cat(separate) if separate else given[2], rtol=0, atol=1e-6)


def test_nothing_of_a_sequence_reaches_another() -> None:
    given = inputs(12)
    before = gated_delta_rule(*given, [5, 7], chunk_size=4)
    for changed in given:
        changed[:5] = changed[:5] * 0.5
    after = gated_delta_rule(*given, [5, 7], chunk_size=4)
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


def test_gradients_are_those_of_finite_differences() -> None:
    given = [x.double().requires_grad_() for x in inputs(5, heads=1, key_dim=2, value_dim=2)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, [3, 2], chunk_size=2), given)


def test_convolution_looks_back_within_a_sequence_only() -> None:
    lengths = [7, 1, 0, 12]
    tokens, weight = torch.randn(20, 6), torch.randn(6, 4)
    found = causal_conv(tokens, weight, lengths)
    for part, result in zip(tokens.split(lengths), found.split(lengths), strict=True):
        for t in range(len(part)):
            seen = part[max(t - 3, 0) : t + 1]
            expected = (seen * weight[:, 4 - len(seen) :].T).sum(0)
            torch.testing.assert_close(result[t], expected, rtol=0, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    given = inputs(70)
    low = [x.bfloat16() for x in given]
    expected = gated_delta_rule(*(x.float() for x in low), [70])
    assert torch.equal(gated_delta_rule(*low, [70]), expected)
    assert functional.cosine_similarity(expected.flatten(), gated_delta_rule(*given, [70]).flatten(), 0) > 0.99
