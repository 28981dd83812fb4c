"""Convert rewards to the values from which advantages are computed; and, one level lower, samples to train data.

    slime train --config demo.yaml --custom-reward-post-process-path examples/hooks/reward_shaping.py
    slime train --config demo.yaml --custom-convert-samples-to-train-data-path examples/hooks/reward_shaping.py

The first function replaces the estimator's group statistics: it gets the samples that are trained on and returns raw
rewards, which are logged, and shaped rewards. The second function replaces the whole step: its rewards are final, so it
calls the first. Samples come as a flat list; `group_index` identifies the group.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from slime_core import Sample


def post_process_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Replace rewards by ranks: in a group, the worst sample gets -1, the best 1, equal samples the same."""
    raw = [sample.get_reward_value(args) for sample in samples]
    groups: dict[int | None, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, raw):
        groups[sample.group_index].append(reward)
    return raw, [_rank(groups[sample.group_index], reward) for sample, reward in zip(samples, raw)]


def convert_samples_to_train_data(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """Return columns with one entry per sample. `tokens`, `response_lengths`, `rewards` and `loss_masks` are required;
    a column that slime does not know (`letters`) reaches `rollout_data` of the advantage and loss functions."""
    raw, shaped = post_process_rewards(args, samples)
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [_mask(s) for s in samples],
        "rewards": shaped,
        "raw_reward": raw,
        "truncated": [int(s.status == Sample.Status.TRUNCATED) for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "letters": [sum(c.isalpha() for c in s.response) for s in samples],
    }


def _mask(sample: Sample) -> list[int]:
    """Return the loss mask; a removed sample keeps its row, but all its tokens are masked."""
    return [0] * sample.response_length if sample.remove_sample else sample.loss_mask or [1] * sample.response_length


def _rank(group: list[float], reward: float) -> float:
    if len(group) == 1:
        return 0.0
    below, above = sum(r < reward for r in group), sum(r > reward for r in group)
    return (below - above) / (len(group) - 1)
