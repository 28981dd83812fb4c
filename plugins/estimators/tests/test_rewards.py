"""Shaped rewards by definition, in float64, and with the numbers of papers and of TRL."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from slime_core import RewardInputs, resolve
from slime_core.config import Args
from slime_core.errors import ConfigError, RolloutError

# From TRL 1.16.0: what `_generate_and_score_completions` of a running trainer returns for these rewards, groups of 4.
TRL_REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 2.0, -1.0, 0.25]
TRL = {
    "grpo": [0.86587542, -0.86587542, -0.86587542, 0.86587542, 0.05076318, 1.26907957, -1.16755319, -0.15228955],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5, 0.0625, 1.5625, -1.4375, -0.1875],
    "rloo": [0.66666663, -0.66666669, -0.66666669, 0.66666663, 0.08333334, 2.08333325, -1.91666675, -0.25],
}
TRL_EPS = 1e-4
"""Number that TRL adds to the deviation; ours is 1e-6, as in THUDM/slime."""


def made(name: str, chosen: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Args]:
    values = {"rewards_normalization": True, "grpo_std_normalization": True, "rollout_max_response_len": 20}
    args = Args(**values | settings, plugins={name: chosen or {}})
    return resolve("estimators", name).obj(args), args


def shape(name: str, rewards: Any, groups: Any = None, chosen: dict[str, Any] | None = None, **columns: Any) -> Any:
    n = len(rewards)
    estimator, args = made(name, chosen)
    ids = (list(groups if groups is not None else [0] * n), columns.pop("rollouts", list(range(n))))
    lengths = list(columns.pop("lengths", [5] * n))
    return estimator.shape_rewards(args, RewardInputs(list(rewards), *ids, lengths, [False] * n, **columns))


def shape_parts(name: str, parts: list[dict[str, float]], groups: Any = None, **chosen: Any) -> list[float]:
    found: list[float] = shape(name, [sum(p.values()) for p in parts], groups, chosen, components=parts)
    return found


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "max_rl", "opo", "remax", "reinforce_plus_plus_baseline", "gdpo"]
)
def test_uneven_groups_against_numpy(name: str) -> None:
    rng = np.random.default_rng(5)
    rewards, groups, lengths = rng.uniform(size=40), rng.integers(0, 6, size=40), rng.integers(1, 200, size=40)
    baselines = rng.normal(size=40)
    expected = []
    for i, (reward, baseline) in enumerate(zip(rewards, baselines)):
        own = groups == groups[i]
        mean, deviation = rewards[own].mean(), rewards[own].std(ddof=1) + 1e-6
        expected.append({
            "grpo": (reward - mean) / deviation, "gdpo": (reward - mean) / deviation,
            "dr_grpo": reward - mean, "reinforce_plus_plus_baseline": reward - mean,
            "rloo": reward - rewards[own & (np.arange(40) != i)].mean(),
            "max_rl": reward / mean - 1,
            "opo": reward - np.average(rewards[own], weights=lengths[own]),
            "remax": reward - baseline,
        }[name])  # fmt: skip
    if name == "gdpo":  # normalised a second time, over the batch
        expected = (np.array(expected) - np.mean(expected)) / (np.std(expected, ddof=1) + 1e-6)
    components = [{"answer": reward} for reward in rewards.tolist()]
    columns = {"lengths": lengths.tolist(), "baselines": baselines.tolist(), "components": components}
    found = shape(name, rewards.tolist(), groups.tolist(), **columns)
    assert found == pytest.approx(list(expected), abs=1e-12)


@pytest.mark.parametrize("name", TRL)
def test_trls_numbers(name: str) -> None:
    found = shape(name, TRL_REWARDS, [0] * 4 + [1] * 4, lengths=[8] * 8)
    if name == "grpo":
        deviations = [statistics.stdev(TRL_REWARDS[:4])] * 4 + [statistics.stdev(TRL_REWARDS[4:])] * 4
        found = [a * (std + 1e-6) / (std + TRL_EPS) for a, std in zip(found, deviations, strict=True)]
    assert found == pytest.approx(TRL[name], abs=1e-6)


def test_rewards_stay_as_they_are_without_normalization() -> None:
    estimator, args = made("reinforce_plus_plus_baseline", rewards_normalization=False)
    assert estimator.shape_rewards(args, RewardInputs([1, 3], [0, 0], [0, 1], [5, 5], [False] * 2)) == [1.0, 3.0]


# -- dapo ------------------------------------------------------------------------------------------------


def test_overlong_responses_lose_the_papers_ramp_before_the_group_statistics() -> None:
    estimator, _ = made("dapo", {"overlong_buffer_len": 5})
    lengths = (1, 15, 16, 18, 20, 25)
    assert [estimator.overlong(n) for n in lengths] == pytest.approx([0, 0, -0.2, -0.6, -1, -1])
    found = shape(
        "dapo", [1.0, 1.0, 0.0], chosen={"overlong_buffer_len": 5, "overlong_penalty": 2.0}, lengths=[3, 20, 18]
    )
    shaped = np.array([1.0, -1.0, -1.2])
    assert found == pytest.approx(((shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)).tolist(), abs=1e-12)
    assert made("dapo", rollout_max_response_len=20480)[0].buffer == 4096  # the paper's numbers
    assert made("dapo", rollout_max_response_len=3)[0].buffer == 1


@pytest.mark.parametrize(
    ("limit", "options", "complaint"),
    [
        (None, {}, "needs --rollout-max-response-len"),
        (10, {"overlong_buffer_len": 11}, "11 must not exceed --rollout-max-response-len 10"),
        (10, {"overlong_penalty": -1}, "overlong_penalty"),
    ],
)
def test_options_of_dapo_that_do_not_fit(limit: int | None, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        made("dapo", options, rollout_max_response_len=limit)


# -- max_rl, opo -----------------------------------------------------------------------------------------


def test_max_rl_is_the_mean_score_of_the_solved() -> None:
    """The paper's estimator is the mean of the score functions of the successes, minus the mean of all.

    With advantages averaged over n: 1/n * A_i = r_i / K - 1 / n, K the number of successes.
    """
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [a / 8 for a in shape("max_rl", rewards)] == pytest.approx([r / 3 - 1 / 8 for r in rewards], abs=1e-12)
    with pytest.raises(RolloutError, match=r"rewards of at least 0 .* got -0.5"):
        shape("max_rl", [1.0, -0.5])


@pytest.mark.parametrize(
    ("rewards", "lengths", "rollouts", "expected"),
    [
        ([1e15, 1e15, 1e15], [1, 3, 7], [0, 1, 2], [0.0] * 3),
        ([1.0, 0.0], [0, 0], [0, 1], [0.5, -0.5]),
        ([1.0, 1.0, 0.0], [20, 40, 30], [7, 7, 8], [0.5, 0.5, -0.5]),  # siblings: one member of their mean length
    ],
)
def test_lengths_in_opo(rewards: list[float], lengths: list[int], rollouts: list[int], expected: list[float]) -> None:
    assert shape("opo", rewards, lengths=lengths, rollouts=rollouts) == pytest.approx(expected)


# -- gdpo ------------------------------------------------------------------------------------------------


def test_gdpo_normalises_each_part_with_its_weight() -> None:
    """The paper's equations 4 to 6."""
    rng, weights = np.random.default_rng(3), {"answer": 2.0, "format": 0.25}
    values, groups = rng.normal(size=(40, 2)), rng.integers(0, 6, size=40)
    total = np.zeros(40)
    for part, weight in zip(values.T, weights.values()):
        for group in set(groups.tolist()):
            own = part[groups == group]
            total[groups == group] += weight * (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    parts = [{"answer": a, "format": f} for a, f in values.tolist()]
    assert shape_parts("gdpo", parts, groups.tolist(), weights=weights) == pytest.approx(expected.tolist(), abs=1e-12)


def test_equal_sums_of_other_parts_get_other_advantages() -> None:
    """The paper's reason: with GRPO two of these responses are alike, here none."""
    parts = [{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 2.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 3.0}]
    assert [len({*shape_parts(name, parts)}) for name in ("grpo", "gdpo")] == [3, 4]
    assert shape_parts("gdpo", []) == []


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ([{}, {}], None, r"gdpo needs rewards with parts; these have none.*--custom-rm-path weighted_sum"),
        ([{"a": 1.0}, {"b": 1.0}], None, r"needs 'a', 'b' on every sample"),
        ([{"a": 1.0}], {"style": 1.0}, r"needs 'style' on every sample; these have a"),
    ],
)
def test_parts_that_are_missing(parts: list[dict[str, float]], weights: dict[str, float] | None, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        shape_parts("gdpo", parts, weights=weights)
