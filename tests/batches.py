"""A training batch of samples that differ only in what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.sample import TrainBatch


def train_batch(masks: Sequence[Sequence[int]], prompt: int = 1, **columns: Any) -> TrainBatch:
    """One sample per loss mask, behind `prompt` tokens; `columns` take the place of what follows from the masks."""
    n, lengths = len(masks), [len(mask) for mask in masks]
    ids, rewards = columns.get("rollout_ids", list(range(n))), columns.get("rewards", [0.0] * n)
    of_rollout = {i: sum(sum(mask) for mask, other in zip(masks, ids, strict=True) if other == i) for i in ids}
    given: dict[str, Any] = {
        "rollout_id": 0, "tokens": [[0] * (length + prompt) for length in lengths], "response_lengths": lengths,
        "loss_masks": [list(mask) for mask in masks], "rewards": rewards, "raw_rewards": rewards, "truncated": [0] * n,
        "sample_indices": list(range(n)), "group_indices": [0] * n, "rollout_ids": ids,
        "rollout_mask_sums": [of_rollout[i] for i in ids],
    }  # fmt: skip
    return TrainBatch(**given | columns)
