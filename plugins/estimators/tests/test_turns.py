"""The estimators with turns: `turn_credit`, `mt_grpo` and `gigpo`, by definition and without bias."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from slime_estimators.gigpo import GiGPO
from slime_estimators.mt_grpo import MTGRPO
from slime_estimators.turn_credit import TurnCredit
from slime_estimators.turns import turn_rewards

from slime_core import AdvantageInputs, RewardInputs, TurnSpan
from slime_core.config import Args

Rows = Sequence[Sequence[float | None]]


def make_args(gamma: float = 1.0, std: bool = True, **plugins: Any) -> Args:
    return Args(gamma=gamma, rewards_normalization=True, grpo_std_normalization=std, plugins=plugins)


def inputs(
    rewards: Rows, states: Sequence[Sequence[str]] | None = None, totals: Sequence[float] | None = None,
    groups: Sequence[int] | None = None, rollouts: Sequence[int] | None = None,
) -> RewardInputs:  # fmt: skip
    n = len(rewards)
    found = [
        [TurnSpan(2 * k, 2 * k + 1, r, state=states[i][k] if states else "s") for k, r in enumerate(row)]
        for i, row in enumerate(rewards)
    ]
    sums = [sum(r or 0.0 for r in row) for row in rewards]
    return RewardInputs(
        list(sums if totals is None else totals), list(groups or [0] * n), list(rollouts or range(n)), [5] * n,
        [False] * n, turns=found,
    )  # fmt: skip


def spread(estimator: Any, args: Args, given: RewardInputs) -> list[list[float]]:
    """The advantage of every turn, through `advantages`; every turn has one token, with one of a tool between."""
    lengths = [max(2 * len(row) - 1, 0) for row in given.turns]
    zeros = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    made = AdvantageInputs(
        rewards=torch.tensor(estimator.shape_rewards(args, given), dtype=torch.float64), response_lengths=lengths,
        group_indices=given.group_indices, rollout_ids=given.rollout_ids, loss_masks=zeros, kl=zeros, turns=given.turns,
        turn_rewards=estimator.shape_turns(args, given),
    )  # fmt: skip
    return [part[::2].tolist() for part in estimator.advantages(args, made).advantages]


def normal(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    return ((np.array(values) - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)).tolist()


REWARDS: Rows = [[0.5, None, 1.0], [1.0, 2.0], [-1.0], [0.25, 0.5, 0.125, 3.0], []]
STATES = [["a", "b", "a"], ["a", "c"], ["a"], ["a", "b", "c", "d"], []]


def test_the_last_turn_has_what_the_others_leave() -> None:
    totals = [2.0, 3.0, 5.0, 1.0, 7.0]
    given = inputs(REWARDS, totals=totals)
    assert turn_rewards(given, on_top=False) == [[0.5, 0.0, 1.5], [1.0, 2.0], [5.0], [0.25, 0.5, 0.125, 0.125], []]
    assert turn_rewards(given, on_top=True) == [[0.5, 0.0, 3.0], [1.0, 5.0], [4.0], [0.25, 0.5, 0.125, 4.0], []]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_turn_credit_by_definition(gamma: float) -> None:
    args = make_args(gamma)
    found = spread(TurnCredit(args), args, inputs(REWARDS))
    rows = [[r or 0.0 for r in row] for row in REWARDS]
    for i, row in enumerate(rows):
        for k in range(len(row)):
            own, *others = (
                sum(gamma ** (m - k) * r for m, r in enumerate(other) if m >= k)
                for j, other in sorted(enumerate(rows), key=lambda pair: pair[0] != i) if len(other) > k
            )  # fmt: skip
            assert found[i][k] == pytest.approx(own - (sum(others) / len(others) if others else 0.0), abs=1e-12)


def test_mt_grpo_by_definition() -> None:
    args = make_args(mt_grpo={"turn_weight": 0.5})
    found = spread(MTGRPO(args), args, inputs(REWARDS))
    outcomes = normal([1.0, 2.0, -1.0, 3.0, 0.0])
    first, second = normal([0.5, 1.0, 0.25]), normal([0.0, 0.5])
    turns = [[first[0], second[0], 0.0], [first[1], 0.0], [0.0], [first[2], second[1], 0.0, 0.0], []]
    for row, outcome, own in zip(found, outcomes, turns):
        assert row == pytest.approx([outcome + 0.5 * value for value in own], abs=1e-12)


@pytest.mark.parametrize("std", [True, False])
def test_gigpo_by_definition(std: bool) -> None:
    args = make_args(0.9, std, gigpo={"step_weight": 2.0})
    found = spread(GiGPO(args), args, inputs(REWARDS, STATES))
    rows = [[r or 0.0 for r in row] for row in REWARDS]
    values = {(i, k): sum(0.9 ** (m - k) * r for m, r in enumerate(row) if m >= k)
              for i, row in enumerate(rows) for k in range(len(row))}  # fmt: skip

    def part(numbers: list[float]) -> list[float]:
        if std or len(numbers) < 2:
            return normal(numbers)
        return [value - sum(numbers) / len(numbers) for value in numbers]

    steps = {}
    for state in "abcd":
        places = [(i, k) for i, k in values if STATES[i][k] == state]
        steps |= dict(zip(places, part([values[place] for place in places])))
    episodes = part([sum(row) for row in rows])
    for (i, k), value in steps.items():
        assert found[i][k] == pytest.approx(episodes[i] + 2.0 * value, abs=1e-12)


# -- a bandit with a stopping action ---------------------------------------------------------------------

CONTINUE, STOP_REWARD, GROUP = 0.6, 0.5, 3


def trajectories() -> Iterator[tuple[float, float, list[float]]]:
    """Probability, score of the first decision (to continue or to stop), rewards of the turns.

    Stopping pays 0.5 at once. Continuing pays nothing at once, and 0.5 or 1.5 for the second turn, 1 on average.
    """
    yield 1 - CONTINUE, -CONTINUE, [STOP_REWARD]
    for second in (0.5, 1.5):
        yield CONTINUE / 2, 1 - CONTINUE, [0.0, second]


def expected_gradient(advantages: Callable[[list[list[float]]], list[list[float]]]) -> float:
    """The exact expectation of mean_i score_i * A_i1 over all groups of three trajectories."""
    total = 0.0
    for group in itertools.product(trajectories(), repeat=GROUP):
        found = advantages([rewards for _, _, rewards in group])
        gradient = sum(score * row[0] for (_, score, _), row in zip(group, found)) / GROUP
        total += math.prod(p for p, _, _ in group) * gradient
    return total


def naive(rewards: list[list[float]]) -> list[list[float]]:
    """Each turn's reward minus the mean of the other trajectories' turns of that number, summed from the turn on."""
    centred = []
    for i, row in enumerate(rewards):
        others = [[other[k] for j, other in enumerate(rewards) if j != i and len(other) > k] for k in range(len(row))]
        centred.append([r - (sum(o) / len(o) if o else CONTINUE_REWARD) for r, o in zip(row, others)])
    return [[sum(row[k:]) for k in range(len(row))] for row in centred]


CONTINUE_REWARD = 1.0
"""Mean reward of the second turn; the naive form's baseline where no other trajectory has one."""


def test_the_naive_form_is_biased_against_turns_and_turn_credit_is_not() -> None:
    """verl #7244: the bias is minus the mean reward of the turn more, in every decision to take it.

    Here the naive gradient points the other way: it learns to stop, for 0.5, where going on pays 1.
    """
    args, variance = make_args(), CONTINUE * (1 - CONTINUE)
    true = variance * (CONTINUE_REWARD - STOP_REWARD)
    ours = expected_gradient(lambda rewards: TurnCredit(args).shape_turns(args, inputs(rewards)))
    assert ours == pytest.approx(true, abs=1e-12)
    biased = expected_gradient(naive)
    assert biased == pytest.approx(true - variance * CONTINUE_REWARD, abs=1e-12)
    assert biased < 0 < true
