"""Samples -> the `rollout/` and `eval/` metrics (names as THUDM/slime's). Pure functions.

A mean is over executions, not samples. Fan-out siblings share the weight of one execution, so that an execution split
into many samples counts like any other. A maximum is the largest sample's value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from slime_core.distributions import entry_points
from slime_core.protocols import Args
from slime_core.sample import NOT_SAMPLED, Group, Sample, SampleStatus
from slime_core.sample.types import execution_rewards, shares, weighted_mean


@cache
def _offered(name: str) -> list[Callable[..., dict[str, float]]]:
    """Return the functions of the entry-point group `slime.metrics`: of (args, groups), samples, or an evaluation."""
    return [entry.load() for offered, entry, _ in entry_points("slime.metrics") if offered == name]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics that exist for any set of samples; keys have no prefix."""
    if not samples:
        return {}
    weights = shares(samples)
    metrics = {
        "truncated_ratio": weighted_mean([s.status == SampleStatus.TRUNCATED for s in samples], weights),
        "failed_ratio": weighted_mean([s.status == SampleStatus.FAILED for s in samples], weights),
    }
    for further in _offered("samples"):
        metrics |= further(samples)
    return metrics


def rollout_metrics(args: Args, groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    """Return `rollout/...` metrics of the groups for training; `weight_version` is the newest version."""
    samples = [s for group in groups for s in group]
    weights = shares(samples)
    metrics = {f"rollout/{k}": v for k, v in sample_metrics(samples).items()}
    rewards = reward_values(args, samples)
    if rewards:
        metrics["rollout/raw_reward"] = statistics.fmean(rewards)
    means = [statistics.fmean(of) for group in groups if (of := reward_values(args, group))]
    if len(means) > 1:  # responses to one prompt are similar: prompts count, not samples
        metrics["rollout/raw_reward_stderr"] = statistics.stdev(means) / math.sqrt(len(means))
    others = [s.token_weight_versions.count(NOT_SAMPLED) for s in samples]
    sampled = [len(s.token_weight_versions) - other for s, other in zip(samples, others)]
    if any(sampled):
        versions = [sum(s.token_weight_versions) - NOT_SAMPLED * other for s, other in zip(samples, others)]
        ages = math.fsum(w * (weight_version * n - v) for w, n, v in zip(weights, sampled, versions))
        metrics["rollout/staleness"] = ages / math.fsum(w * n for w, n in zip(weights, sampled))
    for further in _offered("rollout"):
        metrics |= further(args, groups)
    return metrics


def reward_values(args: Args, samples: Sequence[Sample]) -> list[float]:
    """Return one reward per execution that has one; skip rewards only `--custom-reward-post-process-path` can read."""
    scored = [s for s in samples if s.reward is not None]
    numbers = [s for s in scored if type(s.reward) is float or not isinstance(s.get_reward_value(args), Mapping)]
    return execution_rewards(args, numbers)


def eval_metrics(data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return `eval/<data set>` (mean reward) and `eval/<data set>/...`, and what plugins add."""
    metrics: dict[str, float] = {}
    for name, columns in data.items():
        rewards, samples = columns["rewards"], columns.get("samples") or []
        if not rewards:
            continue
        aligned = len(samples) == len(rewards)
        weights = shares(samples) if aligned else [1.0] * len(rewards)
        metrics[f"eval/{name}"] = weighted_mean(rewards, weights)
        metrics[f"eval/{name}-truncated_ratio"] = weighted_mean([bool(t) for t in columns["truncated"]], weights)
        details = {k: v for k, v in sample_metrics(samples).items() if k != "truncated_ratio"}  # it has its own name
        metrics |= {f"eval/{name}/{k}": v for k, v in details.items()}
        if not aligned and "failed" in columns:
            metrics[f"eval/{name}/failed_ratio"] = columns["failed"] / len(rewards)
        for further in _offered("eval"):
            metrics |= {f"eval/{name}-{k}": value for k, value in further(columns).items()}
    return metrics
