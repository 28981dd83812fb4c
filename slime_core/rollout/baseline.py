"""The greedy baseline: one more response per prompt group, scored and never trained on.

`SampleRunner.run_group` makes it for estimators with `needs_greedy_baseline` (ReMax) and leaves its reward in the
metadata of the group's samples, where `rollout.batch` finds it. Because it travels with the samples, a group that is
continued after an abort keeps its baseline, and one that starts over gets a new one.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.protocols import Args
from slime_core.rollout.fate import restarted
from slime_core.types import Group, Sample, SampleStatus

KEY = "greedy_baseline"
"""Entry of `sample.metadata`: the greedy response's reward, as its reward function returned it."""

FAILED = "greedy_baseline_failed"
"""Reason under which a group without a usable baseline is dropped and counted."""


def baseline_sample(group: Group) -> Sample | None:
    """The group's prompt as a fresh sample to answer greedily; None where a continued group has its baseline.

    Its index is negative, -1 - group_index: no sample of the run has it.
    """
    first = group[0]
    if any(s.response_length for s in group) and KEY in first.metadata:
        return None
    (sample,) = restarted([copy.deepcopy(first)])
    sample.index = -1 - (first.group_index or 0)
    sample.rollout_id = sample.session_id = None
    for name in (KEY, "failure", "start_rollout_id"):
        sample.metadata.pop(name, None)
    return sample


def greedy_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The rollout's sampling settings at temperature 0."""
    return {**params, "temperature": 0.0, "top_p": 1.0, "top_k": -1}


def attach(samples: Iterable[Sample], siblings: Sequence[Sample]) -> None:
    """Put the baseline's reward on the samples; None for one that failed, no entry for one that was interrupted.

    Args:
        samples: The group's samples, before and after generation.
        siblings: What the baseline came back as; several when its generate function fanned out.
    """
    statuses = {s.status for s in siblings}
    if statuses & {SampleStatus.ABORTED, SampleStatus.PENDING}:
        return
    rewards = [s.reward for s in siblings if s.status != SampleStatus.FAILED and s.reward is not None]
    usable = bool(rewards) and len(rewards) == len(siblings)
    for sample in samples:
        sample.metadata[KEY] = (rewards[0] if len(rewards) == 1 else rewards) if usable else None


def missing(group: Sequence[Sample]) -> str | None:
    """Why a finished group cannot be compared with its baseline: "aborted", `FAILED`, or None when it can."""
    values = [s.metadata.get(KEY, ...) for s in group]
    if any(value is ... for value in values):
        return "aborted"
    return FAILED if any(value is None for value in values) else None


def baseline_reward(args: Args, sample: Sample) -> float | None:
    """The baseline's scalar reward (`--reward-key` picks from a mapping), siblings averaged; None without one.

    Raises:
        ValueError: It is no finite number.
    """
    stored = sample.metadata.get(KEY)
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
