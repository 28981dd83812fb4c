"""Samples -> the `rollout/` and `eval/` metrics (names as THUDM/slime's). Pure functions.

A mean is over executions, not samples. Fan-out siblings share the weight of one execution, so that an execution split
into many samples counts like any other. A maximum is the largest sample's value.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from slime_core.distributions import entry_points
from slime_core.protocols import Args
from slime_core.sample import NOT_SAMPLED, Group, Sample, SampleStatus, is_score
from slime_core.sample.fan_out import execution_rewards, executions, mean, shares, weighted_mean


def stats(values: Sequence[float], name: str) -> dict[str, float]:
    """Return `name/{mean,median,max,min}`; empty input gives no entries."""
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def shared_stats(values: Sequence[float], samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Return `stats` of samples: mean and median over executions (mean of their siblings), extremes over all samples.

    Args:
        values: [n].
        samples: [n] samples of the values.
        name: Name of the metric.
    """
    of = dict(zip(map(id, samples), values, strict=True))
    found = stats([mean([of[id(s)] for s in siblings]) for siblings in executions(samples)], name)
    if found:
        found |= {f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}
    return found


def has_repetition(text: str) -> bool:
    """Return True if the last 10,000 characters compress more than tenfold (THUDM/slime's test for loops)."""
    if len(text) <= 10_000:
        return False
    tail = text[-10_000:].encode()
    return len(tail) / len(zlib.compress(tail)) > 10


@cache
def _offered(name: str) -> list[Callable[..., dict[str, float]]]:
    """Return the functions of the entry-point group `slime.metrics`: of (args, groups), samples, or an evaluation."""
    return [entry.load() for offered, entry, _ in entry_points("slime.metrics") if offered == name]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics that exist for any set of samples; keys have no prefix."""
    if not samples:
        return {}
    weights = shares(samples)

    def mean_of(values: Sequence[float]) -> float:
        return weighted_mean(values, weights)

    metrics = shared_stats([s.effective_response_length for s in samples], samples, "response_len")
    metrics["truncated_ratio"] = mean_of([s.status == SampleStatus.TRUNCATED for s in samples])
    metrics["repetition_frac"] = mean_of([has_repetition(s.response) for s in samples])
    metrics["failed_ratio"] = mean_of([s.status == SampleStatus.FAILED for s in samples])
    prompt_tokens = mean_of([s.prefix_cache_info.total_prompt_tokens for s in samples])
    cached = mean_of([s.prefix_cache_info.cached_tokens for s in samples])
    metrics["prefix_cache_hit_rate"] = cached / prompt_tokens if prompt_tokens else 0.0
    metrics["avg_cached_tokens_per_sample"] = cached
    if any(s.spec_info.spec_verify_ct for s in samples):
        metrics["spec_accept_rate"] = mean_of([s.spec_info.spec_accept_rate for s in samples])
        metrics["spec_accept_length"] = mean_of([s.spec_info.spec_accept_length for s in samples])
    for further in _offered("samples"):
        metrics |= further(samples)
    return metrics | noted_metrics(samples)


def noted_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the means of the numbers in `metadata["sample_metrics"]`, {name: number}, written by user code.

    The mean of a name is over the executions that have it. Values that are not finite numbers are skipped.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for given, weight in noted(samples, "sample_metrics"):
        for name, value in given.items():
            if is_score(value):
                found[str(name)].append((value, weight))
    return {name: weighted_mean(*map(list, zip(*pairs))) for name, pairs in sorted(found.items())}


def noted(samples: Sequence[Sample], key: str) -> list[tuple[Mapping[Any, Any], float]]:
    """Return the mappings that user code left in the samples' metadata under `key`, each with its sample's share."""
    found = [(s.metadata[key], weight) for s, weight in zip(samples, shares(samples)) if key in s.metadata]
    return [(given, weight) for given, weight in found if isinstance(given, Mapping)]


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
    for reward, count in _constant_groups(args, groups).items():
        metrics[f"rollout/zero_std/count_{reward}"] = float(count)
    others = [s.token_weight_versions.count(NOT_SAMPLED) for s in samples]
    sampled = [len(s.token_weight_versions) - other for s, other in zip(samples, others)]
    if any(sampled):
        versions = [sum(s.token_weight_versions) - NOT_SAMPLED * other for s, other in zip(samples, others)]
        ages = math.fsum(w * (weight_version * n - v) for w, n, v in zip(weights, sampled, versions))
        metrics["rollout/staleness"] = ages / math.fsum(w * n for w, n in zip(weights, sampled))
    turns = [(s.metadata["num_turns"], w) for w, s in zip(weights, samples) if "num_turns" in s.metadata]
    if turns:
        metrics["rollout/num_turns"] = weighted_mean(*zip(*turns))
    for further in _offered("rollout"):
        metrics |= further(args, groups)
    return metrics


def reward_values(args: Args, samples: Sequence[Sample]) -> list[float]:
    """Return one reward per execution that has one; skip rewards only `--custom-reward-post-process-path` can read."""
    scored = [s for s in samples if s.reward is not None]
    numbers = [s for s in scored if type(s.reward) is float or not isinstance(s.get_reward_value(args), Mapping)]
    return execution_rewards(args, numbers)


def _constant_groups(args: Args, groups: Sequence[Group]) -> Counter[float]:
    """Count the rewards (to one digit) of the groups in which every execution got the same reward."""
    counts: Counter[float] = Counter()
    for group in groups:
        rewards = set(reward_values(args, group))
        if len(rewards) == 1 and len(executions(group)) > 1:
            counts[round(rewards.pop(), 1)] += 1
    return counts


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
