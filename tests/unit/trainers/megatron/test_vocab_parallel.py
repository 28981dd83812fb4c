"""In one process, which holds all columns, or plays ranks that hold some: the sums over ranks are then done here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from slime_testing_contracts.trainer import example_batch
from slime_trainer_megatron.step.packed import PackedBatch, Packing, pack
from slime_trainer_megatron.step.vocab_parallel import VocabularyPart, vocab_parallel_log_probs

from slime_core.errors import TrainError
from slime_core.ops import SamplingMask
from tests.sweeps import sweep

ROWS, TOKENS, WIDTH = 9, 11, 13
PART = VocabularyPart.of_rank(0, WIDTH, TOKENS)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(0, TOKENS, (ROWS,), generator=generator)


def closed_form(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log p of the targets and -sum p log p over the tokens alone, in float64."""
    z = logits[:, :TOKENS].double() / temperature
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@sweep(
    "chunk_size, overwrite, dtype",
    product([-1, 1, 4, 100], [False, True], [torch.float64, torch.float32, torch.bfloat16]),
)
def test_values_and_gradients_are_the_closed_form(chunk_size: int, overwrite: bool, dtype: torch.dtype) -> None:
    logits, targets = inputs(dtype)
    weights = torch.linspace(-1, 2, ROWS)
    expected_logits = logits.double().clone().requires_grad_()
    wanted = closed_form(expected_logits, targets, 0.7)
    (wanted[0] * weights + wanted[1] * weights.flip(0)).sum().backward()
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf * 1, targets, PART, temperature=0.7, chunk_size=chunk_size, with_entropy=True, overwrite=overwrite
    )
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (log_probs * weights + entropy * weights.flip(0)).sum().backward()
    tight = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(log_probs.double(), wanted[0], rtol=0, atol=tight)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=0, atol=tight)
    assert leaf.grad is not None
    assert expected_logits.grad is not None
    loose = tight if dtype != torch.bfloat16 else 3e-2
    torch.testing.assert_close(leaf.grad.double(), expected_logits.grad, rtol=0, atol=loose)
    assert not bool(leaf.grad[:, TOKENS:].any()), "padding of the vocabulary has a gradient"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_log_probs_alone(overwrite: bool, temperature: float) -> None:
    """In float32 this is computed in the memory of the logits where they may be overwritten, and only there."""
    logits, targets = inputs(torch.float32)
    weights = torch.linspace(-1, 2, ROWS)
    expected = logits.double().requires_grad_()
    (closed_form(expected, targets, temperature)[0] * weights).sum().backward()
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    log_probs, _ = vocab_parallel_log_probs(given, targets, PART, temperature=temperature, overwrite=overwrite)
    (log_probs * weights).sum().backward()
    assert leaf.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=0, atol=3e-6)
    assert torch.equal(given.detach(), logits) is not overwrite


def test_impossible_tokens_count_nothing() -> None:
    logits, targets = inputs()
    logits[:, 3] = -torch.inf
    targets[:] = 4
    leaf = logits.requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(leaf, targets, PART, with_entropy=True)
    assert entropy is not None
    (log_probs + entropy).sum().backward()
    assert leaf.grad is not None
    assert bool(entropy.isfinite().all())
    assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, VocabularyPart(0, 8)), (1, VocabularyPart(8, 3)), (2, VocabularyPart(16, 0))]
)
def test_the_last_ranks_have_the_padding(rank: int, expected: VocabularyPart) -> None:
    assert VocabularyPart.of_rank(rank, 8, TOKENS) == expected


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 13])
def test_a_sampling_mask_over_split_columns(ranks: int, overwrite: bool) -> None:
    """Ranks as threads, some with none of a row's kept tokens: numbers and gradients are those of one dense softmax."""
    logits, targets = inputs()
    kept = [sorted({(3 * row + i) % TOKENS for i in range(row % 4)} | {int(t)}) if row % 4 else list(range(TOKENS))
            for row, t in enumerate(targets)]  # fmt: skip
    rows = [ids if row % 4 else [] for row, ids in enumerate(kept)]
    mask = SamplingMask(torch.tensor([i for ids in rows for i in ids]), torch.tensor([0, *accumulate(map(len, rows))]))
    exact = logits.clone().requires_grad_()
    log_p = [(row[ids] / 0.7).log_softmax(0) for row, ids in zip(exact, kept)]
    wanted = torch.stack([part[ids.index(int(t))] for part, ids, t in zip(log_p, kept, targets)])
    entropies = torch.stack([-(part.exp() * part).sum() for part in log_p])
    (wanted - 0.3 * entropies).sum().backward()
    shared, width = Shared(ranks), WIDTH // ranks if WIDTH % ranks == 0 else WIDTH // ranks + 1

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = torch.nn.functional.pad(logits, (0, ranks * width - WIDTH))[:, rank * width : (rank + 1) * width]
        leaf = columns.clone().requires_grad_()
        part = shared.part(VocabularyPart.of_rank(rank, width, TOKENS), rank)
        found = vocab_parallel_log_probs(
            leaf * 1, targets, part, temperature=0.7, chunk_size=4, with_entropy=True, overwrite=overwrite, mask=mask
        )
        assert found[1] is not None
        (found[0] - 0.3 * found[1]).sum().backward()
        assert leaf.grad is not None
        return found[0].detach(), found[1].detach(), leaf.grad

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for log_probs, entropy, _ in found:
        torch.testing.assert_close(log_probs, wanted.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(entropy, entropies.detach(), rtol=0, atol=1e-12)
    assert exact.grad is not None
    gradient = torch.cat([part for *_, part in found], 1)[:, :WIDTH]
    torch.testing.assert_close(gradient, exact.grad, rtol=0, atol=1e-12)


class Shared:
    """All-reduces of ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.slots = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks

    def part(self, part: VocabularyPart, rank: int) -> VocabularyPart:
        """The same columns, whose sums and maxima go over the threads."""

        def reduce_(tensor: torch.Tensor, op: Any) -> torch.Tensor:
            self.slots[rank] = tensor.clone()
            self.barrier.wait()
            whole = torch.stack(self.slots)
            self.barrier.wait()
            return tensor.copy_(whole.sum(0) if op == torch.distributed.ReduceOp.SUM else whole.amax(0))

        object.__setattr__(part, "reduce_", reduce_)
        return part


# -- packed micro-batches --------------------------------------------------------------------------------

CPU = torch.device("cpu")
VOCABULARY = 99


def parts(positions: list[int], context: int, multiple: int = 1, least: int = 0) -> list[PackedBatch]:
    """Return the part of each context-parallel rank."""
    batch = example_batch()
    return [pack(batch, positions, VOCABULARY, Packing(r, context, multiple, least), CPU) for r in range(context)]


def whole(found: list[PackedBatch], name: str, places: str, total: int) -> list[int]:
    """A column of all ranks, put where it belongs; -1 where nothing came."""
    out = [-1] * total
    for micro in found:
        for value, place in zip(getattr(micro, name).tolist(), getattr(micro, places).tolist(), strict=True):
            assert out[place] == -1, "two ranks have it"
            out[place] = value
    return out


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_every_token_and_target_is_on_one_rank(context: int, multiple: int) -> None:
    batch, positions = example_batch(), [2, 0, 3]
    found = parts(positions, context, multiple)
    tokens = [t for p in positions for t in batch.tokens[p]]
    responses = [t for p in positions for t in batch.tokens[p][-batch.response_lengths[p] :]]
    first = found[0]
    assert (first.num_tokens, first.num_responses) == (len(tokens), len(responses))
    assert whole(found, "targets", "places", len(responses)) == responses
    held = [-1] * len(tokens)
    for micro in found:
        here = micro.token_ids[0][micro.token_rows].tolist()
        for token, place in zip(here, micro.token_places.tolist(), strict=True):
            held[place] = token
        assert micro.token_ids.shape[1] % multiple == 0
        assert micro.token_ids.shape == first.token_ids.shape
        assert micro.token_ids.shape[1] * context == micro.boundaries[-1]
        assert not bool(micro.padding[0][micro.token_rows].any())
        assert int((~micro.padding).sum()) == len(micro.token_rows)
    assert held == tokens


@pytest.mark.parametrize("context", [1, 2])
def test_a_targets_sampling_mask_goes_where_it_goes(context: int) -> None:
    batch, positions = example_batch(), [2, 0, 3]
    kept = [
        [[token, *range(token % 3)] for token in batch.tokens[i][-n:]] for i, n in enumerate(batch.response_lengths)
    ]
    batch.rollout_top_p_token_ids = [[t for ids in row for t in ids] for row in kept]
    batch.rollout_top_p_token_offsets = [list(accumulate(map(len, row), initial=0)) for row in kept]
    for rank in range(context):
        micro = pack(batch, positions, VOCABULARY, Packing(rank, context, 1, 0), CPU)
        assert micro.mask is not None
        found = [micro.mask.ids[a:b].tolist() for a, b in pairwise(micro.mask.offsets.tolist())]
        assert found == [[token, *range(token % 3)] for token in micro.targets.tolist()]


@pytest.mark.parametrize(("positions", "vocabulary", "message"), [([], 99, "without samples"), ([2], 5, "outside")])
def test_what_cannot_be_packed(positions: list[int], vocabulary: int, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        pack(example_batch(), positions, vocabulary, Packing(), CPU)
