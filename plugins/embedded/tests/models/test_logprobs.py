"""Log-probs of sampled tokens, over the whole vocabulary or a part."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import accumulate

import pytest
import torch
from slime_embedded.models.logprobs import log_probs_from_logits, token_log_probs

from slime_core.ops import SamplingMask
from slime_core.ops import log_probs_from_logits as ops_log_probs_from_logits
from slime_core.ops import token_log_probs as ops_token_log_probs


def naive(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def problem(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return h, w, torch.randint(vocab, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_autograd_in_float64(chunk_size: int | None, temperature: float) -> None:
    h, w, targets = problem(11, 6, 13)
    expected = naive(h @ w.T, targets, temperature)
    weights = torch.randn(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((expected[0] * weights[0] + expected[1] * weights[1]).sum(), (h, w))
    log_probs, entropy = token_log_probs(h, w, targets, temperature, chunk_size, with_entropy=True)
    assert entropy is not None
    found = torch.autograd.grad((log_probs * weights[0] + entropy * weights[1]).sum(), (h, w))
    torch.testing.assert_close((log_probs, entropy), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_gradients_of_one_output_alone(which: str) -> None:
    h, w, targets = problem(7, 4, 9)
    index = 0 if which == "log_probs" else 1
    wanted = torch.autograd.grad(naive(h @ w.T, targets, 1.0)[index].sum(), (h, w))
    output = token_log_probs(h, w, targets, chunk_size=2, with_entropy=True)[index]
    assert output is not None
    torch.testing.assert_close(torch.autograd.grad(output.sum(), (h, w)), wanted)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_from_logits(chunk_size: int, dtype: torch.dtype) -> None:
    h, w, targets = problem(9, 5, 12)
    logits = (h @ w.T).detach().to(dtype).requires_grad_()
    before = logits.detach().clone()
    wide = before.double().requires_grad_()
    expected = naive(wide, targets, 0.8)
    (wanted,) = torch.autograd.grad((expected[0] - 0.3 * expected[1]).sum(), wide)
    log_probs, entropy = log_probs_from_logits(logits, targets, 0.8, chunk_size, with_entropy=True)
    assert entropy is not None
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (found,) = torch.autograd.grad((log_probs - 0.3 * entropy).sum(), logits)
    assert torch.equal(logits.detach(), before)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=tolerance, atol=tolerance)
    grad_tolerance = 1e-2 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(found.double(), wanted, rtol=grad_tolerance, atol=grad_tolerance)


def test_bfloat16_inputs_keep_float32_sums() -> None:
    """The result is that of bfloat16 logits in float32 arithmetic, and the weight gradient is summed in float32."""
    h, w, targets = problem(64, 16, 50, torch.bfloat16)
    logits = (h @ w.T).float()
    log_probs, entropy = token_log_probs(h, w, targets, chunk_size=1, with_entropy=True)
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((log_probs, entropy), naive(logits, targets, 1.0), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(log_probs.sum(), (h, w))
    assert all(grad.dtype == torch.bfloat16 for grad in found)
    exact_h, exact_w = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    wanted = torch.autograd.grad(naive(exact_h @ exact_w.T, targets, 1.0)[0].sum(), (exact_h, exact_w))
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("chunk_size", [None, 300])
def test_many_rows_in_float32(chunk_size: int | None) -> None:
    torch.set_num_threads(1)
    h, w, targets = problem(601, 48, 83, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (h, w)]
    expected, _ = naive(exact[0] @ exact[1].T, targets, 0.7)
    found = token_log_probs(h, w, targets, 0.7, chunk_size)[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected.sum(), exact)
    first = torch.autograd.grad(found.sum(), (h, w), retain_graph=True)
    again = torch.autograd.grad(found.sum(), (h, w))  # the first has used up logits that were kept
    for a, b, c in zip(first, again, wanted, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), c, rtol=1e-4, atol=1e-4)


def test_a_float32_master_weight_gets_a_float32_gradient() -> None:
    h, w, targets = problem(6, 4, 7, torch.float32)
    half = h.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = token_log_probs(half, w, targets)
    log_probs.sum().backward()
    assert w.grad is not None
    assert half.grad is not None
    assert (w.grad.dtype, half.grad.dtype) == (torch.float32, torch.bfloat16)


def test_an_impossible_token_does_not_poison_entropy_or_gradient() -> None:
    logits = torch.tensor([[0.3, -torch.inf, 1.0], [0.0, 2.0, -torch.inf]], requires_grad=True)
    log_probs, entropy = log_probs_from_logits(logits, torch.tensor([0, 1]), with_entropy=True)
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    rest = torch.log_softmax(torch.tensor([0.3, 1.0]), 0)
    torch.testing.assert_close(entropy[0].detach(), -(rest.exp() * rest).sum())


MEASURE = """
    import resource, sys, torch
    from slime_embedded.models.logprobs import token_log_probs
    torch.set_num_threads(1)
    T, H, V = 512, 8, 151936
    h, w = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    targets = torch.randint(V, (T,))
    (h[:2] @ w[:64].T).log_softmax(-1).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.argv[1] == "naive":
        log_p = (h @ w.T).float().log_softmax(-1)
        out = log_p.gather(-1, targets[:, None]).sum()
    else:
        log_probs, entropy = token_log_probs(h, w, targets, with_entropy=True)
        out = log_probs.sum() + 0.1 * entropy.sum()
    out.backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_kib(kind: str) -> int:
    """Growth of the peak memory of a fresh process, in KiB."""
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=dict(os.environ))
    return int(done.stdout)


@pytest.mark.slow
def test_peak_memory_is_at_most_a_quarter_of_the_naive_one_at_a_large_vocabulary() -> None:
    assert peak_kib("chunked") <= peak_kib("naive") / 4


@pytest.mark.parametrize(("target", "dtype"), [(-100, torch.int64), (7, torch.int64), (-1, torch.int32)])
def test_a_target_outside_the_vocabulary_is_refused(target: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # with which C computes
    h, w, targets = problem(3, 16, 7, torch.float32)
    targets[-1] = target
    with pytest.raises((IndexError, RuntimeError), match=r"7|allowed: 0 to 6|int64"):
        log_probs_from_logits((h @ w.T).detach(), targets.to(dtype))


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
            found = ops_token_log_probs(*leaves, TARGETS, 0.7, chunk_size, True, mask_of(KEPT))
        else:
            found = ops_log_probs_from_logits(leaves[0] @ leaves[1].T, TARGETS, 0.7, chunk_size, True, mask_of(KEPT))
        (found[0] * of_log_probs + found[1] * of_entropy).sum().backward()
        grads.append([*(value.detach() for value in found), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


BETA, SAMPLED = 0.5, ([0, 1, 3], [0, 2])
"""Arms of the four that a sampler keeps in two states, whose policies have the same logits."""
