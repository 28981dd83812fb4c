"""Log-probs over the tokens that were sampled among: against dense float64, and where the gradient leads."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from slime_core.ops import SamplingMask, log_probs_from_logits, token_log_probs
from slime_core.ops.ratios import kl_estimate

ROWS, VOCAB = 7, 9
KEPT: list[list[int]] = [[0, 3, 5], [], [8], [1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8], [4, 6], [2, 7]]
"""The second row keeps all; the last does not name its own target, which counts all the same."""
TARGETS = torch.tensor([3, 4, 8, 1, 0, 6, 5])


def mask_of(rows: list[list[int]]) -> SamplingMask:
    ids = torch.tensor([i for row in rows for i in row])
    return SamplingMask(ids, torch.tensor(list(accumulate(map(len, rows), initial=0))))


def dense(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy by one softmax per row over the kept tokens alone."""
    log_probs, entropies = [], []
    for row, kept, target in zip(z, KEPT, TARGETS.tolist(), strict=True):
        ids = sorted({*(kept or range(VOCAB)), target})
        part = row[ids].log_softmax(0)
        log_probs.append(part[ids.index(target)])
        entropies.append(-(part.exp() * part).sum())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients_are_of_the_softmax_over_what_was_kept(fused: bool, chunk_size: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 4, generator=generator, dtype=torch.float64) * 3
    of_log_probs, of_entropy = torch.randn(2, ROWS, generator=generator, dtype=torch.float64).unbind()
    grads = []
    for exact in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if exact:
            found = dense(leaves[0] @ leaves[1].T / 0.7)
        elif fused:
            found = token_log_probs(*leaves, TARGETS, 0.7, chunk_size, True, mask_of(KEPT))
        else:
            found = log_probs_from_logits(leaves[0] @ leaves[1].T, TARGETS, 0.7, chunk_size, True, mask_of(KEPT))
        (found[0] * of_log_probs + found[1] * of_entropy).sum().backward()
        grads.append([*(value.detach() for value in found), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_was_not_kept_has_no_gradient() -> None:
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64).requires_grad_()
    found, _ = log_probs_from_logits(logits, TARGETS, mask=mask_of(KEPT))
    found.sum().backward()
    assert logits.grad is not None
    for row, (kept, target) in enumerate(zip(KEPT, TARGETS.tolist(), strict=True)):
        outside = [i for i in range(VOCAB) if kept and i not in (*kept, target)]
        assert not logits.grad[row, outside].any()


REWARDS = torch.tensor([1.0, 0.4, 0.9, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)
BETA, SAMPLED = 0.5, ([0, 1, 3], [0, 2])
"""What a sampler leaves of the four arms in two states, whose policies have the same logits."""


def objective(logits: torch.Tensor) -> torch.Tensor:
    """E[r] - beta KL(p || reference) of what is sampled from, summed over the states."""
    parts = [(logits[ids].log_softmax(0), REFERENCE[ids].log().log_softmax(0), REWARDS[ids]) for ids in SAMPLED]
    return torch.stack([(log_p.exp() * (r - BETA * (log_p - ref))).sum() for log_p, ref, r in parts]).sum()


def optimum() -> torch.Tensor:
    """Logits at which the objective is greatest, by its own gradient."""
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -objective(logits)
        loss.backward()
        return loss

    optimizer.step(closure)
    return logits.detach()


def learned(masked: bool) -> torch.Tensor:
    """Logits in the end, by policy gradients and a KL loss: exact expectations over what is drawn, on-policy."""
    logits = REFERENCE.log().clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=1.0)
    arms = torch.tensor([arm for ids in SAMPLED for arm in ids])
    mask = mask_of([ids for ids in SAMPLED for _ in ids]) if masked else None
    ref, _ = log_probs_from_logits(REFERENCE.log().repeat(len(arms), 1), arms, mask=mask)
    for _ in range(300):
        drawn = [logits.detach()[ids].softmax(0) for ids in SAMPLED]
        advantages = torch.cat([REWARDS[ids] - (p * REWARDS[ids]).sum() for p, ids in zip(drawn, SAMPLED)])
        log_p, _ = log_probs_from_logits(logits.repeat(len(arms), 1), arms, mask=mask)
        kl = kl_estimate(log_p, ref, "low_var_kl", importance_log_ratio=log_p - log_p.detach())
        optimizer.zero_grad()
        (torch.cat(drawn) * (BETA * kl - advantages * log_p)).sum().backward()
        optimizer.step()
    return logits.detach()


def test_a_bandit_learns_the_optimum_of_what_is_sampled() -> None:
    """Without the mask it learns something else, at which the objective is less."""
    best, masked, plain = optimum(), learned(True), learned(False)
    for ids in SAMPLED:
        torch.testing.assert_close(masked[ids].softmax(0), best[ids].softmax(0), atol=2e-3, rtol=0)
    assert max((plain[ids].softmax(0) - best[ids].softmax(0)).abs().max() for ids in SAMPLED) > 0.05
    assert objective(plain) < objective(best) - 0.01
