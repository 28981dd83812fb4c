"""The estimators with turns: `turn_credit`, `mt_grpo` and `gigpo`, by definition, and on small tasks."""

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


@pytest.mark.parametrize(
    ("rewards", "states", "same"),
    [
        ([[0.0, 1.0], [0.25, 0.0], [0.5, 0.0]], ["ab", "ab", "ba"], True),
        ([[0.0, 1.0], [0.25], [0.5, 0.0]], ["ab", "a", "ba"], False),  # a long episode counts more often
        ([[0.0, 1.0], [0.25, 0.0], [0.5, 0.5]], ["ab", "ab", "ac"], True),
    ],
)
def test_gigpo_differs_from_the_form_with_a_row_per_turn_where_the_page_says(
    rewards: Rows, states: list[str], same: bool
) -> None:
    """The form that takes turns as the rows of a batch, without divisions; see the page's table of deviations."""
    args = make_args(0.9, std=False)
    found = spread(GiGPO(args), args, inputs(rewards, [[*row] for row in states]))
    rows = [
        (state, sum(0.9 ** (m - k) * (r or 0.0) for m, r in enumerate(row) if m >= k), sum(r or 0.0 for r in row))
        for row, own in zip(rewards, states) for k, state in enumerate(own)
    ]  # fmt: skip
    whole = np.mean([total for *_, total in rows])
    expected = []
    for state, later, total in rows:
        expected.append(total - whole + later - np.mean([other for name, other, _ in rows if name == state]))
    assert ([value for row in found for value in row] == pytest.approx(expected, abs=1e-12)) is same


@pytest.mark.parametrize("kind", [TurnCredit, MTGRPO, GiGPO])
def test_groups_of_one_equal_rewards_and_siblings(kind: Callable[[Args], Any]) -> None:
    args = make_args()
    estimator = kind(args)
    same = [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [5.0, 7.0]]
    states = [["a", "b"]] * 4
    found = spread(estimator, args, inputs(same, states, groups=[0, 0, 0, 1]))
    assert [value for row in found for value in row] == pytest.approx([0.0] * 8, abs=1e-9)
    rows: Rows = [[1.0, 0.0], [0.0, 3.0], [0.5]]
    states = [["a", "b"], ["a", "b"], ["a"]]
    plain = spread(estimator, args, inputs(rows, states))
    copied = spread(estimator, args, inputs([rows[0], *rows], [states[0], *states], rollouts=[0, 0, 1, 2]))
    assert copied[1:] == [pytest.approx(row, abs=1e-9) for row in plain]


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


# -- small tasks -----------------------------------------------------------------------------------------


def test_mt_grpo_learns_the_turn_that_the_outcome_does_not_show() -> None:
    """A tool call in turn 1 pays 0.05, the answer in turn 2 is right by a coin: GRPO's sum hardly shows the first."""
    args, ends = make_args(), {}
    for name in ("outcome", "turns"):
        rng, logit = np.random.default_rng(0), 0.0
        for _ in range(60):
            p = 1 / (1 + math.exp(-logit))
            calls, right = rng.random(8) < p, rng.random(8) < 0.5
            given = inputs([[0.05 * c, float(r)] for c, r in zip(calls, right)])
            estimator = MTGRPO(args)
            advantages = spread(estimator, args, given) if name == "turns" else [[v] for v in normal(given.rewards)]
            logit += 0.3 * sum(row[0] * (c - p) for row, c in zip(advantages, calls)) / 8
        ends[name] = 1 / (1 + math.exp(-logit))
    assert ends["turns"] > 0.85
    assert ends["turns"] > ends["outcome"] + 0.1


def test_gigpo_learns_from_a_state_where_all_episodes_succeed() -> None:
    """From state a one action reaches the goal, the other comes back to a: every episode pays 1, so GRPO is blind."""
    args, logit, rng = make_args(0.9), 0.0, np.random.default_rng(0)
    for _ in range(40):
        p = 1 / (1 + math.exp(-logit))
        lengths = [int(n) for n in rng.geometric(p, size=8).clip(max=12)]
        given = inputs([[0.0] * (n - 1) + [1.0] for n in lengths], [["a"] * n for n in lengths])
        assert normal(given.rewards) == [0.0] * 8
        found = spread(GiGPO(args), args, given)
        logit += 0.1 * sum(a * ((k == n - 1) - p) for n, row in zip(lengths, found) for k, a in enumerate(row)) / 8
    assert 1 / (1 + math.exp(-logit)) > 0.8
