"""`slime.utils.metric_utils`: what users' log functions compute with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from slime import _missing


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The mapping with `prefix` before every key."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """`mean`, `median`, `max` and `min`; nothing for no values."""
    if not values:
        return {}
    numbers = [float(value) for value in values]
    found = (statistics.fmean(numbers), statistics.median(numbers), max(numbers), min(numbers))
    return dict(zip(("mean", "median", "max", "min"), found))


def compute_pass_rate(
    flat_rewards: Sequence[float],
    group_size: int,
    num_groups: int | None = None,
    group_ids: Sequence[Any] | None = None,
) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to `group_size`, or the smallest group; a reward of 1 is correct.

    Unbiased as in Chen et al. (Codex, 2021), over `slime_core`'s own.

    Args:
        flat_rewards: [samples]; groups lie one after the other, unless `group_ids` says.
        group_size: Samples of a group.
        num_groups: How many; by default as many as there are.
        group_ids: [samples] which group each is of; groups may have different sizes.

    Raises:
        ValueError: The numbers do not fit together.
    """
    from slime_runs.sample_metrics import pass_rates

    if group_ids is not None:
        groups: dict[Any, list[float]] = {}
        for reward, group in zip(flat_rewards, group_ids, strict=True):
            groups.setdefault(group, []).append(reward)
        return {} if group_size == 1 else pass_rates(groups.values())
    if group_size < 1 or len(flat_rewards) % group_size or num_groups not in (None, len(flat_rewards) // group_size):
        raise ValueError(f"{len(flat_rewards)} rewards are not {num_groups or 'whole'} groups of {group_size}")
    if group_size == 1:
        return {}
    return pass_rates([flat_rewards[i : i + group_size] for i in range(0, len(flat_rewards), group_size)])


def has_repetition(text: str) -> bool:
    """Whether the text ends in a loop (`slime_runs.sample_metrics.has_repetition`)."""
    from slime_runs.sample_metrics import has_repetition as found

    return found(text)


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """The step that a rollout's metrics are logged under: its number, here always."""
    return rollout_id


__all__ = ["compute_pass_rate", "compute_rollout_step", "compute_statistics", "dict_add_prefix", "has_repetition"]
__getattr__ = _missing.names(__name__)
