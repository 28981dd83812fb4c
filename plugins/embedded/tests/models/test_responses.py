from __future__ import annotations

import pytest
import torch
from slime_embedded.models.logprobs import response_log_probs

TOKENS = [[1, 2, 3, 4], [0, 5], [6, 3, 2]]
RESPONSES = [2, 1, 2]


def make_logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 9, 7, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_token_is_predicted_by_the_row_before_it(temperature: float) -> None:
    logits = make_logits()
    log_probs, entropies = response_log_probs(logits, TOKENS, RESPONSES, temperature, with_entropy=True)
    assert entropies is not None
    table = torch.log_softmax(logits[0] / temperature, dim=-1)
    start = 0
    for i, (tokens, length) in enumerate(zip(TOKENS, RESPONSES, strict=True)):
        places = range(len(tokens) - length, len(tokens))
        expected = torch.stack([table[start + t - 1, tokens[t]] for t in places])
        rows = torch.stack([table[start + t - 1] for t in places])
        torch.testing.assert_close(log_probs[i], expected)
        torch.testing.assert_close(entropies[i], -(rows.exp() * rows).sum(-1))
        start += len(tokens)


def test_the_gradient_is_autograds() -> None:
    ours, plain = make_logits(), make_logits()
    log_probs, entropies = response_log_probs(
        ours, [torch.tensor(t) for t in TOKENS], RESPONSES, 0.7, with_entropy=True
    )
    assert entropies is not None
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    (torch.cat(log_probs) @ weights + torch.cat(entropies) @ weights).backward()
    table = torch.log_softmax(plain[0] / 0.7, dim=-1)
    rows = table[[1, 2, 4, 6, 7]]
    picked = rows[range(5), [3, 4, 5, 3, 2]]
    (picked @ weights - (rows.exp() * rows).sum(-1) @ weights).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="logits of 9 tokens, but 2 samples with 6 tokens"):
        response_log_probs(make_logits(), TOKENS[:2], RESPONSES[:2])
    with pytest.raises(ValueError, match="a prompt token is needed"):
        response_log_probs(make_logits(), TOKENS, [4, 1, 2])
