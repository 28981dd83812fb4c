"""The greedy baseline of a group, for an estimator with `needs_greedy_baseline` (ReMax).

Each group gets one more response at temperature 0, scored and never trained on. `SampleRunner.run_group` makes it and
leaves its reward in the metadata of the group's samples, where `rollout.batch` finds it: a group that is continued
after an abort keeps it, and one that starts over gets a new one. The core finds this module by the entry-point group
`slime.data`.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.errors import RolloutError
from slime_core.protocols import Args
from slime_core.rollout.fate import restarted
from slime_core.sample import Group, Sample, SampleStatus

BASELINE = "greedy_baseline"
"""Entry of `sample.metadata`: the greedy response's reward, as its reward function returned it."""

BASELINE_FAILED = "greedy_baseline_failed"
"""Reason under which a group without a usable baseline is dropped and counted."""


def extra_sample(group: Group) -> Sample | None:
    """Return the group's prompt as a fresh sample to answer greedily; None if a continued group has its baseline.

    Its index is negative, -1 - group_index: no sample of the run has it.
    """
    first = group[0]
    if any(s.response_length for s in group) and BASELINE in first.metadata:
        return None
    (sample,) = restarted([copy.deepcopy(first)])
    sample.index = -1 - (first.group_index or 0)
    sample.rollout_id = sample.session_id = None
    for name in (BASELINE, "failure", "start_rollout_id"):
        sample.metadata.pop(name, None)
    return sample


def extra_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rollout's sampling settings at temperature 0."""
    return {**params, "temperature": 0.0, "top_p": 1.0, "top_k": -1}


def attach(samples: Iterable[Sample], siblings: Sequence[Sample]) -> None:
    """Put the baseline's reward on the samples; None if the baseline failed, no entry if it was interrupted.

    Args:
        samples: The group's samples, before and after generation.
        siblings: The baseline after generation; several samples if its generate function fanned out.
    """
    statuses = {s.status for s in siblings}
    if statuses & {SampleStatus.ABORTED, SampleStatus.PENDING}:
        return
    rewards = [s.reward for s in siblings if s.status != SampleStatus.FAILED and s.reward is not None]
    usable = bool(rewards) and len(rewards) == len(siblings)
    for sample in samples:
        sample.metadata[BASELINE] = (rewards[0] if len(rewards) == 1 else rewards) if usable else None


def lack(group: Sequence[Sample]) -> str | None:
    """Return why a finished group has no baseline to compare with: "aborted" or `BASELINE_FAILED`; None if it has."""
    values = [s.metadata.get(BASELINE, ...) for s in group]
    if any(value is ... for value in values):
        return "aborted"
    return BASELINE_FAILED if any(value is None for value in values) else None


def baseline_reward(args: Args, sample: Sample) -> float | None:
    """Return the baseline's scalar reward (`--reward-key` picks from a mapping), siblings averaged; None without one.

    Raises:
        ValueError: The reward is not a finite number.
    """
    stored = sample.metadata.get(BASELINE)
    if stored is None:
        return None
    key = args.reward_key
    values = [value[key] if key else value for value in (stored if isinstance(stored, list) else [stored])]
    if any(isinstance(value, Mapping) for value in values):
        return None
    try:
        mean = statistics.fmean(values)
    except (TypeError, ValueError):
        mean = math.nan
    if not math.isfinite(mean):
        raise ValueError(f"the greedy baseline's reward {stored!r} is no finite number")
    return mean


def baselines(args: Args, samples: Sequence[Sample], estimator: str) -> list[float]:
    """Return the reward of each sample's greedy baseline. Raises RolloutError if one has none; `estimator` needs it."""
    rewards = []
    for sample in samples:
        name = f"sample {sample.index} (group {sample.group_index}, {sample.status.value})"
        try:
            reward = baseline_reward(args, sample)
        except (ValueError, KeyError) as error:
            raise RolloutError(f"{name}: {error}") from error
        if reward is None:
            raise RolloutError(
                f"{name} has no greedy baseline, which {estimator} needs; a rollout function of"
                ' your own makes it with context.runner.run_group, or sets sample.metadata["greedy_baseline"]'
            )
        rewards.append(reward)
    return rewards
