from __future__ import annotations

import statistics

import pytest
import torch
from slime_estimators.grpo import GRPO

from slime_core import AdvantageInputs, RewardInputs
from slime_core.config import Args

# From TRL 1.16.0: what `_generate_and_score_completions` of a running trainer returns for these rewards, groups of 4.
TRL_REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 2.0, -1.0, 0.25]
TRL_GROUP = [0.86587542, -0.86587542, -0.86587542, 0.86587542, 0.05076318, 1.26907957, -1.16755319, -0.15228955]
TRL_NONE = [0.5, -0.5, -0.5, 0.5, 0.0625, 1.5625, -1.4375, -0.1875]
TRL_EPS = 1e-4
"""What TRL adds to the deviation; here it is 1e-6, as in THUDM/slime."""


def make_args(**changes: object) -> Args:
    values = {"rewards_normalization": True, "grpo_std_normalization": True, "eps_clip": 0.2}
    return Args(**{**values, **changes})


def shape(rewards: list[float], groups: list[int], rollouts: list[int] | None = None, **changes: object) -> list[float]:
    args = make_args(**changes)
    n = len(rewards)
    return GRPO(args).shape_rewards(
        args, RewardInputs(rewards, groups, rollouts or list(range(n)), [8] * n, [False] * n)
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1, 1, 1, 0], [0.499999, 0.499999, 0.499999, -1.499997]),
    ],
)
def test_golden_group_advantages(rewards: list[float], expected: list[float]) -> None:
    assert shape(rewards, [0] * 4) == pytest.approx(expected, abs=1e-6)


def test_trls_numbers() -> None:
    groups = [0] * 4 + [1] * 4
    assert shape(TRL_REWARDS, groups, grpo_std_normalization=False) == pytest.approx(TRL_NONE, abs=1e-6)
    deviations = [statistics.stdev(TRL_REWARDS[:4])] * 4 + [statistics.stdev(TRL_REWARDS[4:])] * 4
    ours = [a * (std + 1e-6) / (std + TRL_EPS) for a, std in zip(shape(TRL_REWARDS, groups), deviations, strict=True)]
    assert ours == pytest.approx(TRL_GROUP, abs=1e-6)


def test_uneven_groups_are_normalised_each_on_its_own() -> None:
    assert shape([1, 0, 2, 4, 6], [0, 0, 1, 1, 1])[2:] == pytest.approx([-1, 0, 1], abs=1e-5)


def test_a_group_of_one_and_a_group_of_equals_get_nothing() -> None:
    assert shape([3.0], [0]) == [0.0]
    assert shape([0.1, 0.1, 0.1], [0, 0, 0]) == pytest.approx([0, 0, 0], abs=1e-9)


def test_the_advantage_is_broadcast_over_the_response() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.5, -1.5]),
        response_lengths=[2, 3],
        group_indices=[0, 0],
        rollout_ids=[0, 1],
        loss_masks=[torch.ones(2), torch.tensor([1.0, 0.0, 1.0])],
        kl=[torch.zeros(2), torch.zeros(3)],
    )
    result = GRPO(make_args()).advantages(make_args(), inputs)
    assert [a.tolist() for a in result.advantages] == [[0.5, 0.5], [-1.5, -1.5, -1.5]]
    assert [r.tolist() for r in result.returns] == [[0.5, 0.5], [-1.5, -1.5, -1.5]]
