from __future__ import annotations

import numpy as np
import pytest
import torch
from slime_embedded.models.packed import GROUP_FLOOR, GROUP_RATIO, PackedLayout, _row_map

MIXED = [5, 70, 33, 1, 300, 64, 65, 71, 310]


def test_groups_hold_every_sequence_once_and_pad_little() -> None:
    layout = PackedLayout.build(MIXED)
    assert sum(n for n, _ in layout.groups) == len(MIXED)
    longest_first = sorted(MIXED, reverse=True)
    for n, length in sorted(layout.groups, key=lambda g: -g[1]):
        members, longest_first = longest_first[:n], longest_first[n:]
        assert members[0] == length
        assert length <= GROUP_FLOOR or members[-1] * GROUP_RATIO >= length


@pytest.mark.parametrize("lengths", [MIXED, [7], [4, 4, 4], [2, 4, 3]])
def test_split_gives_padded_sequences_and_join_brings_the_rows_back(lengths: list[int]) -> None:
    layout = PackedLayout.build(lengths)
    x = torch.randn(sum(lengths), 6)
    parts = layout.split(x, heads=2)
    assert torch.equal(layout.join(parts), x)
    sequences = {tuple(s.flatten().tolist()) for s in torch.split(x, lengths)}
    found = set()
    for part, (n, length) in zip(parts, layout.groups, strict=True):
        assert part.shape == (n, 2, length, 3)
        for sequence in part.transpose(1, 2).flatten(2):
            hits = [tuple(sequence[:k].flatten().tolist()) for k in range(1, length + 1)]
            found |= sequences & set(hits)
    assert found == sequences


def test_padding_carries_no_gradient() -> None:
    lengths = [2, 5, 3]
    layout = PackedLayout.build(lengths)
    x = torch.randn(10, 4, requires_grad=True)
    out = layout.join([part * 2 for part in layout.split(x, heads=1)])
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    assert torch.equal(x.grad, 2 * weight)


@pytest.mark.parametrize("lengths", [MIXED, [4, 4, 4]])
def test_kept_rows_come_in_the_order_asked_for_with_their_gradients(lengths: list[int]) -> None:
    total = sum(lengths)
    rows = np.random.default_rng(0).permutation(total)[: total // 2]
    layout = PackedLayout.build(lengths, rows=rows)
    x = torch.randn(total, 4, requires_grad=True)
    assert layout.keep is not None
    for kept in (layout.join(layout.split(x, heads=2), kept_only=True), layout.keep(x)):
        assert torch.equal(kept, x[rows])
        weight = torch.randn_like(kept)
        (grad,) = torch.autograd.grad((kept * weight).sum(), x)
        expected = torch.zeros(total, 4)
        expected[rows] = weight
        assert torch.equal(grad, expected)


def test_gradients_of_repeated_rows_are_added_in_one_order_with_two_threads() -> None:
    rows = np.random.default_rng(0).integers(0, 600, 4000)
    _, first, index = np.unique(rows, return_index=True, return_inverse=True)
    gather = _row_map(index, first, None, "cpu", np.delete(np.arange(len(index)), first))
    x, grad = torch.zeros(len(first), 576, requires_grad=True), torch.randn(len(index), 576)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.autograd.grad(gather(x), x, grad)[0] for _ in range(6)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(part, found[0]) for part in found)
    expected = torch.zeros(len(first), 576, dtype=torch.float64).index_add_(0, torch.from_numpy(index), grad.double())
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)
