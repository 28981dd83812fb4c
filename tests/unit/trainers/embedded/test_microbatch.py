from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slime_core.errors import TrainError
from slime_core.trainers.embedded.microbatch import pack
from slime_core.types import TrainBatch

CPU = torch.device("cpu")


def test_rows_point_at_the_predecessors_of_the_response(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch(6)
    micro = pack(batch, [4, 0, 3], 61, CPU)
    expected_ids, expected_rows, expected_targets = [], [], []
    for i in (4, 0, 3):
        start, tokens = len(expected_ids), batch.tokens[i]
        for t in range(len(tokens) - batch.response_lengths[i], len(tokens)):
            expected_rows.append(start + t - 1)
            expected_targets.append(tokens[t])
        expected_ids += tokens
    assert micro.token_ids.tolist() == expected_ids
    assert micro.rows.tolist() == expected_rows
    assert micro.targets.tolist() == expected_targets


def test_a_sample_without_response_has_no_rows(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch(2)
    batch.response_lengths[1] = 0
    assert pack(batch, [1], 61, CPU).rows.shape == (0,)


def test_bad_samples_are_named(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch(3)
    batch.sample_indices = [70, 71, 72]
    with pytest.raises(TrainError, match="without samples"):
        pack(batch, [], 61, CPU)
    with pytest.raises(TrainError, match="vocabulary of 5"):
        pack(batch, [0], 5, CPU)
    batch.response_lengths[1] = len(batch.tokens[1])
    with pytest.raises(TrainError, match=r"sample 71 .* at least one prompt token"):
        pack(batch, [0, 1], 61, CPU)
