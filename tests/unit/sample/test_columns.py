"""The weight versions of a batch: from samples, from a user's columns, and as staleness."""

from __future__ import annotations

from typing import Any

import pytest
from slime_data.converted import batch_from_columns

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.rollout.batch import make_batch
from slime_core.sample import NOT_SAMPLED, Sample

ARGS = Args(reward_key=None)


def sample(versions: list[int], **changes: Any) -> Sample:
    n = max(len(versions), 2)
    fields: dict[str, Any] = {"tokens": [1, *[2] * n], "response_length": n, "reward": 1.0}
    return Sample(**{**fields, "token_weight_versions": versions, **changes})


def test_versions_are_a_column_only_where_a_token_is_stale() -> None:
    fresh = [sample([4, 4]), sample([4, NOT_SAMPLED, 4])]
    batch = make_batch(ARGS, 0, [fresh], None, weight_version=4)
    assert batch.token_weight_versions is None
    assert batch.weight_version == 4
    batch = make_batch(ARGS, 0, [[*fresh, sample([3, 4])]], None, weight_version=4)
    assert batch.token_weight_versions == [[4, 4], [4, NOT_SAMPLED, 4], [3, 4]]
    assert batch.to_rollout_data()["token_weight_versions"] == batch.token_weight_versions
    assert "weight_version" not in batch.to_rollout_data()


def test_a_users_columns_bring_versions_or_take_the_samples() -> None:
    columns = {
        "tokens": [[1, 2, 3]],
        "response_lengths": [2],
        "rewards": [1.0],
        "loss_masks": [[1, 1]],
    }
    samples = [sample([1, 3])]
    assert batch_from_columns(0, samples, columns, 3).token_weight_versions == [[1, 3]]
    given = {**columns, "token_weight_versions": [[2, 2]]}
    assert batch_from_columns(0, samples, given, 3).token_weight_versions == [[2, 2]]
    with pytest.raises(RolloutError, match="row 0 of token_weight_versions has 1 entries for a response of 2 tokens"):
        batch_from_columns(0, samples, {**columns, "token_weight_versions": [[2]]}, 3)
