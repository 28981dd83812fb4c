from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from slime_testing_contracts.trainer import example_batch
from slime_trainer_megatron.step.packed import PackedBatch, Packing, pack

from slime_core.errors import TrainError

CPU = torch.device("cpu")
VOCABULARY = 99


def parts(positions: list[int], context: int, multiple: int = 1, least: int = 0) -> list[PackedBatch]:
    """What each context-parallel rank gets."""
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
