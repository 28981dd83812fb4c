"""Samples -> the `rollout/` and `eval/` metrics (names as THUDM/slime's). Pure functions."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime_core.rollout.baseline import baseline_reward
from slime_core.routed_experts import RoutedExperts
from slime_core.types import NOT_SAMPLED, Group, Sample, SampleStatus


def stats(values: Sequence[float], name: str) -> dict[str, float]:
    """`name/{mean,median,max,min}`; empty input gives no entries."""
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of solving a prompt within k tries: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021).

    Raises:
        ValueError: k is larger than the number of samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_rates(rewards_by_prompt: Iterable[Sequence[float]]) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to the smallest group, averaged over prompts; correct means reward 1."""
    groups = [list(rewards) for rewards in rewards_by_prompt if len(rewards)]
    if not groups:
        return {}
    smallest = min(len(g) for g in groups)
    powers = [2**i for i in range(smallest.bit_length()) if 2**i <= smallest]
    return {f"pass@{k}": statistics.fmean(pass_at_k(len(g), sum(r == 1 for r in g), k) for g in groups) for k in powers}


def has_repetition(text: str) -> bool:
    """The last 10,000 characters compress more than tenfold (THUDM/slime's test for loops)."""
    if len(text) <= 10_000:
        return False
    tail = text[-10_000:].encode()
    return len(tail) / len(zlib.compress(tail)) > 10


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What can be said of any set of samples; keys have no prefix."""
    if not samples:
        return {}
    n = len(samples)
    metrics = stats([s.effective_response_length for s in samples], "response_len")
    metrics["truncated_ratio"] = sum(s.status == SampleStatus.TRUNCATED for s in samples) / n
    metrics["repetition_frac"] = sum(has_repetition(s.response) for s in samples) / n
    metrics["failed_ratio"] = sum(s.status == SampleStatus.FAILED for s in samples) / n
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
    metrics["prefix_cache_hit_rate"] = cached / prompt_tokens if prompt_tokens else 0.0
    metrics["avg_cached_tokens_per_sample"] = cached / n
    if any(s.spec_info.spec_verify_ct for s in samples):
        metrics["spec_accept_rate"] = statistics.fmean(s.spec_info.spec_accept_rate for s in samples)
        metrics["spec_accept_length"] = statistics.fmean(s.spec_info.spec_accept_length for s in samples)
    return metrics


def routing_replay_fraction(samples: Sequence[Sample]) -> float:
    """Tokens whose routed experts are known, of all that a forward pass turns into a prediction."""
    total = sum(max(0, len(s.tokens) - 1) for s in samples)
    known = sum(
        RoutedExperts.of(s.rollout_routed_experts).num_known() for s in samples if s.rollout_routed_experts is not None
    )
    return known / total if total else 0.0


def rollout_metrics(args: Any, groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    """`rollout/...` of the groups that go to training; `weight_version` is the newest one."""
    samples = [s for group in groups for s in group]
    metrics = {f"rollout/{k}": v for k, v in sample_metrics(samples).items()}
    rewards = [value for s in samples if (value := _number(args, s)) is not None]
    if rewards:
        metrics["rollout/raw_reward"] = statistics.fmean(rewards)
    baselines = [value for g in groups if g and (value := baseline_reward(args, g[0])) is not None]
    if baselines:
        metrics["rollout/greedy_baseline_reward"] = statistics.fmean(baselines)
    for reward, count in _constant_groups(args, groups).items():
        metrics[f"rollout/zero_std/count_{reward}"] = float(count)
    staleness = [weight_version - v for s in samples for v in s.token_weight_versions if v != NOT_SAMPLED]
    if staleness:
        metrics["rollout/staleness"] = statistics.fmean(staleness)
    turns = [s.metadata["num_turns"] for s in samples if "num_turns" in s.metadata]
    if turns:
        metrics["rollout/num_turns"] = statistics.fmean(turns)
    if args.use_rollout_routing_replay:
        metrics["rollout/routing_replay_fraction"] = routing_replay_fraction(samples)
    category = args.log_reward_category
    if category:
        kinds = Counter(str(s.reward[category]) for s in samples if isinstance(s.reward, Mapping))
        metrics |= {f"rollout/error_cat/{kind}": count / len(samples) for kind, count in kinds.items()}
    if args.log_passrate:
        metrics |= {f"rollout/passrate/{k}": v for k, v in pass_rates(_rewards_by_group(args, samples)).items()}
    if args.log_multi_turn:
        metrics |= {f"rollout/multi_turn/{k}": v for k, v in multi_turn_metrics(args, samples).items()}
    if args.log_correct_samples:
        correct = [s for s in samples if _number(args, s) == 1]
        metrics["rollout/correct/ratio"] = len(correct) / len(samples)
        metrics |= {f"rollout/correct/{k}": v for k, v in sample_metrics(correct).items()}
    return metrics


def multi_turn_metrics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """`--log-multi-turn`: lengths with and without what the policy did not write, and rounds (THUDM/slime's names).

    `raw_response_length` counts every response token, `wo_obs_response_length` those with loss mask 1; `clip_ratio` is
    the share of responses at least `--rollout-max-response-len` long. Rounds are `metadata["round_number"]`, else
    `metadata["num_turns"]`.
    """
    raw = [s.response_length for s in samples]
    metrics = _spread(raw, "raw_response_length/response_length")
    limit = args.rollout_max_response_len
    if limit is not None:
        metrics["raw_response_length/response_length_clip_ratio"] = statistics.fmean(n >= limit for n in raw)
    metrics |= _spread([s.effective_response_length for s in samples], "wo_obs_response_length/response_length")
    rounds = [s.metadata.get("round_number", s.metadata.get("num_turns")) for s in samples]
    known = [float(r) for r in rounds if r is not None]
    return metrics | (_spread(known, "multi_turn_metric/round_number") if known else {})


def _spread(values: Sequence[float], name: str) -> dict[str, float]:
    """`name_{mean,max,min}`."""
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_max": float(max(values)),
        f"{name}_min": float(min(values)),
    }


def _number(args: Any, sample: Sample) -> float | None:
    """The sample's scalar reward; None when it has none (a mapping that `--custom-reward-post-process-path` reads)."""
    if sample.reward is None:
        return None
    value = sample.get_reward_value(args)
    return None if isinstance(value, Mapping) else float(value)


def _constant_groups(args: Any, groups: Sequence[Group]) -> Counter[float]:
    """Rewards (to one digit) of the groups in which every sample got the same."""
    counts: Counter[float] = Counter()
    for group in groups:
        rewards = {value for s in group if (value := _number(args, s)) is not None}
        if len(rewards) == 1 and len(group) > 1:
            counts[round(rewards.pop(), 1)] += 1
    return counts


def _rewards_by_group(args: Any, samples: Iterable[Sample]) -> list[list[float]]:
    rewards: dict[int | None, list[float]] = defaultdict(list)
    for sample in samples:
        if (value := _number(args, sample)) is not None:
            rewards[sample.group_index].append(value)
    return list(rewards.values())


def eval_metrics(data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`eval/<data set>` (mean reward) and `eval/<data set>/...`; pass@k from the data set's own group sizes."""
    metrics: dict[str, float] = {}
    for name, columns in data.items():
        rewards, samples = columns["rewards"], columns.get("samples") or []
        if not rewards:
            continue
        metrics[f"eval/{name}"] = statistics.fmean(rewards)
        metrics[f"eval/{name}-truncated_ratio"] = sum(map(bool, columns["truncated"])) / len(rewards)
        details = {k: v for k, v in sample_metrics(samples).items() if k != "truncated_ratio"}  # it has its own name
        metrics |= {f"eval/{name}/{k}": v for k, v in details.items()}
        by_prompt: dict[int | None, list[float]] = defaultdict(list)
        for sample, reward in zip(samples, rewards):
            by_prompt[sample.group_index].append(reward)
        metrics |= {f"eval/{name}-{k}": v for k, v in pass_rates(by_prompt.values()).items()}
    return metrics
