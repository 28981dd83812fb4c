"""Metrics of a rollout's samples that settings ask for (`--log-passrate`, ReMax and others), of tools and of rewards.

`slime_runs.metrics` adds them to its own (entry-point group `slime.metrics`). Pure functions.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_data.greedy_baseline import baseline_reward

from slime_core.protocols import Args
from slime_core.sample import Group, Sample, is_score
from slime_core.sample.routed_experts import RoutedExperts
from slime_core.sample.types import executions, mean, shares, weighted_mean
from slime_runs.metrics import reward_values, sample_metrics
from slime_runs.scores import pass_at_k

__all__ = [
    "component_metrics", "further_metrics", "has_repetition", "metrics_of_samples", "noted_metrics", "pass_rates",
    "tool_metrics",
]  # fmt: skip


def further_metrics(args: Args, groups: Sequence[Group]) -> dict[str, float]:
    """Return the `rollout/...` metrics that the settings ask for."""
    samples = [s for group in groups for s in group]
    metrics: dict[str, float] = {}
    baselines = [value for g in groups if g and (value := baseline_reward(args, g[0])) is not None]
    if baselines:
        metrics["rollout/greedy_baseline_reward"] = statistics.fmean(baselines)
    turns = [(s.metadata["num_turns"], w) for w, s in zip(shares(samples), samples) if "num_turns" in s.metadata]
    if turns:
        metrics["rollout/num_turns"] = weighted_mean(*zip(*turns))
    for reward, count in _constant_groups(args, groups).items():
        metrics[f"rollout/zero_std/count_{reward}"] = float(count)
    if args.use_rollout_routing_replay:
        metrics["rollout/routing_replay_fraction"] = routing_replay_fraction(samples)
    category = args.log_reward_category
    if category:
        metrics |= {f"rollout/error_cat/{kind}": v for kind, v in _categories(category, samples).items()}
    if args.log_passrate:
        metrics |= {f"rollout/passrate/{k}": v for k, v in pass_rates(_rewards_by_group(args, samples)).items()}
    if args.log_multi_turn:
        metrics |= {f"rollout/multi_turn/{k}": v for k, v in multi_turn_metrics(args, samples).items()}
    if args.log_correct_samples:
        members = executions(samples)
        correct = [siblings for siblings in members if reward_values(args, siblings) == [1]]
        metrics["rollout/correct/ratio"] = len(correct) / len(members)
        of_correct = sample_metrics([s for siblings in correct for s in siblings])
        metrics |= {f"rollout/correct/{k}": v for k, v in of_correct.items()}
    return metrics


def _constant_groups(args: Args, groups: Sequence[Group]) -> Counter[float]:
    """Count the rewards (to one digit) of the groups in which every execution got the same reward."""
    counts: Counter[float] = Counter()
    for group in groups:
        rewards = set(reward_values(args, group))
        if len(rewards) == 1 and len(executions(group)) > 1:
            counts[round(rewards.pop(), 1)] += 1
    return counts


def pass_rates(rewards_by_prompt: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return `pass@k` for k = 1, 2, 4, ... up to the smallest group, averaged over prompts; correct means reward 1."""
    groups = [list(rewards) for rewards in rewards_by_prompt if len(rewards)]
    if not groups:
        return {}
    smallest = min(len(g) for g in groups)
    powers = [2**i for i in range(smallest.bit_length()) if 2**i <= smallest]
    return {f"pass@{k}": statistics.fmean(pass_at_k(len(g), sum(r == 1 for r in g), k) for g in groups) for k in powers}


def routing_replay_fraction(samples: Sequence[Sample]) -> float:
    """Return the fraction of predicting tokens whose routed experts are known."""
    weights = shares(samples)
    total = math.fsum(w * max(0, len(s.tokens) - 1) for w, s in zip(weights, samples))
    known = math.fsum(
        w * RoutedExperts.of(s.rollout_routed_experts).num_known()
        for w, s in zip(weights, samples)
        if s.rollout_routed_experts is not None
    )
    return known / total if total else 0.0


def _categories(key: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Return value of the reward's entry `key` -> share of all executions."""
    weights = shares(samples)
    kinds: dict[str, list[float]] = defaultdict(list)
    for weight, sample in zip(weights, samples):
        if isinstance(sample.reward, Mapping):
            kinds[str(sample.reward[key])].append(weight)
    return {kind: math.fsum(found) / math.fsum(weights) for kind, found in kinds.items()}


def multi_turn_metrics(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of `--log-multi-turn`: response lengths and rounds (THUDM/slime's names).

    `raw_response_length` counts every response token, `wo_obs_response_length` those with loss mask 1; `clip_ratio` is
    the share of responses at least `--rollout-max-response-len` long. Rounds are `metadata["round_number"]`, else
    `metadata["num_turns"]`.
    """
    raw, weights = [s.response_length for s in samples], shares(samples)
    metrics = _spread(raw, weights, "raw_response_length/response_length")
    limit = args.rollout_max_response_len
    if limit is not None:
        metrics["raw_response_length/response_length_clip_ratio"] = weighted_mean([n >= limit for n in raw], weights)
    effective = [s.effective_response_length for s in samples]
    metrics |= _spread(effective, weights, "wo_obs_response_length/response_length")
    rounds = [s.metadata.get("round_number", s.metadata.get("num_turns")) for s in samples]
    known = [(float(r), w) for r, w in zip(rounds, weights) if r is not None]
    counts, of_known = [r for r, _ in known], [w for _, w in known]
    return metrics | (_spread(counts, of_known, "multi_turn_metric/round_number") if known else {})


def _spread(values: Sequence[float], weights: Sequence[float], name: str) -> dict[str, float]:
    """Return `name_{mean,max,min}`."""
    return {
        f"{name}_mean": weighted_mean(values, weights),
        f"{name}_max": float(max(values)),
        f"{name}_min": float(min(values)),
    }


def _rewards_by_group(args: Args, samples: Iterable[Sample]) -> list[list[float]]:
    groups: dict[int | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_index].append(sample)
    return [reward_values(args, group) for group in groups.values()]


STATS = "tool_stats"
"""In a sample's metadata: {tool: {"calls", "errors", "seconds", ...}}, written by generators that call tools."""
_NAMES = {"errors": "error_ratio"}
"""Sum -> name of the metric, if different."""


def metrics_of_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of responses, engine, tools, parts of rewards and user code, for any set of samples."""
    weights = shares(samples)

    def mean_of(values: Sequence[float]) -> float:
        return weighted_mean(values, weights)

    metrics = shared_stats([s.effective_response_length for s in samples], samples, "response_len")
    metrics["repetition_frac"] = mean_of([has_repetition(s.response) for s in samples])
    prompt_tokens = mean_of([s.prefix_cache_info.total_prompt_tokens for s in samples])
    cached = mean_of([s.prefix_cache_info.cached_tokens for s in samples])
    metrics["prefix_cache_hit_rate"] = cached / prompt_tokens if prompt_tokens else 0.0
    metrics["avg_cached_tokens_per_sample"] = cached
    if any(s.spec_info.spec_verify_ct for s in samples):
        metrics["spec_accept_rate"] = mean_of([s.spec_info.spec_accept_rate for s in samples])
        metrics["spec_accept_length"] = mean_of([s.spec_info.spec_accept_length for s in samples])
    return metrics | tool_metrics(samples) | component_metrics(samples) | noted_metrics(samples)


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


def noted_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the means of the numbers in `metadata["sample_metrics"]`, {name: number}, written by user code.

    The mean of a name is over the executions that have it. Values that are not finite numbers are skipped.
    """
    given = noted(samples, "sample_metrics")
    return _means(({str(n): v for n, v in numbers.items() if is_score(v)}, weight) for numbers, weight in given)


def noted(samples: Sequence[Sample], key: str) -> list[tuple[Mapping[Any, Any], float]]:
    """Return the mappings that user code left in the samples' metadata under `key`, each with its sample's share."""
    found = [(s.metadata[key], weight) for s, weight in zip(samples, shares(samples)) if key in s.metadata]
    return [(given, weight) for given, weight in found if isinstance(given, Mapping)]


def component_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `reward/<name>`: the mean of each part of the reward over the executions that have it."""
    parts = _means((sample.reward_components or {}, weight) for sample, weight in zip(samples, shares(samples)))
    return {f"reward/{name}": value for name, value in parts.items()}


def _means(numbers: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Return the weighted mean of each name over the mappings that have it, sorted by name."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for named, weight in numbers:
        for name, value in named.items():
            found[name].append((value, weight))
    return {name: weighted_mean(*map(list, zip(*pairs))) for name, pairs in sorted(found.items())}


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `tools/<tool>/{calls,error_ratio,seconds,...}`; empty if no sample called a tool.

    Values that are not finite numbers, and tools without calls, are skipped: a user's generator may write them too.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0.0, "errors": 0.0, "seconds": 0.0})
    for stats, weight in noted(samples, STATS):
        for tool, counts in stats.items():
            for name, value in counts.items() if isinstance(counts, Mapping) else ():
                if is_score(value):
                    sums[tool][name] = sums[tool].get(name, 0.0) + weight * value
    metrics: dict[str, float] = {}
    executed = sum(shares(samples)) if sums else 0.0
    for tool, found in sorted(sums.items()):
        calls = found.pop("calls")
        if calls > 0:
            metrics[f"tools/{tool}/calls"] = calls / executed
            metrics |= {f"tools/{tool}/{_NAMES.get(name, name)}": value / calls for name, value in found.items()}
    return metrics
