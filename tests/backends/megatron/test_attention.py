"""Core attention over context-parallel ranks, and its gradients, are those over whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.process_groups import ProcessGroups

from tests.backends.megatron.ranks import RankPool

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_attention"


def own_part(whole: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
    """Chunks r and 2 * size - 1 - r of a sequence."""
    if groups.context_size == 1:
        return whole
    chunks = whole.chunk(2 * groups.context_size)
    return torch.cat((chunks[groups.context_rank], chunks[-1 - groups.context_rank]))


def gradients(size: int) -> dict[str, float]:
    """Core attention over `size` context-parallel ranks against the same on the whole sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from slime_trainer_megatron.model.attention import CoreAttention

    groups = ProcessGroups(Layout(context=size), "cpu", timeout_minutes=1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    over_ranks, alone = (CoreAttention(config, 1, AttnMaskType.causal, "self") for _ in range(2))
    alone.context_group = groups.tensor_group
    lengths = [4 * size, 2 * size, 6 * size]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    params = PackedSeqParams("thd", starts, starts)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 6), (24,))
    *whole, direction = (torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([own_part(sequence, groups) for sequence in x.split(lengths)])

    own = [part(x).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    found, expected = over_ranks(*own, None, packed_seq_params=params), alone(*whole, None, packed_seq_params=params)
    found.backward(part(direction))
    expected.backward(direction)
    pairs = {"output": (found, expected)} | {
        name: (mine.grad, all_.grad) for name, mine, all_ in zip(("query", "key", "value"), own, whole, strict=True)
    }
    return {name: float((mine - part(all_)).abs().max()) for name, (mine, all_) in pairs.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_context_ranks_and_its_gradients(ranks: Callable[[int], RankPool], size: int) -> None:
    for found in ranks(size).run(f"{HERE}:gradients", size=size):
        assert max(found.values()) < 1e-5, found
