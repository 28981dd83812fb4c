"""The event model against arithmetic done by hand, and against the closed form of asynchronous overlap."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_commands.plan.simulate import Plan, Prediction, simulate
from slime_commands.plan.workload import GroupWork, Speed, Workload

TEN = GroupWork((10, 10))
STEADY = Speed(1.0)


def run(*groups: GroupWork, speed: Speed = STEADY, **changes: Any) -> Prediction:
    work = {
        k: changes.pop(k)
        for k in ("train_fixed", "train_per_token", "push", "evaluate", "save", "accepted")
        if k in changes
    }
    return simulate(Workload(groups, speed, **work), Plan(**{"rollouts": 10, "rollout_batch_size": 2, **changes}))


def test_synchronous_step_is_a_sum() -> None:
    found = run(TEN, train_fixed=5.0, push=1.0)
    assert found.step_seconds == pytest.approx(10 + 5 + 1)
    assert found.trainer_idle == pytest.approx(11 / 16)
    assert found.engine_idle == pytest.approx(6 / 16)
    assert found.total_seconds == pytest.approx(1 + 10 * 16)
    assert found.staleness == {0: 1.0}
    assert found.wasted == 0


def test_company_slows_a_sample_and_more_engines_help() -> None:
    shared = Speed(per_step=1.0, per_active=0.5, latency=2.0)
    assert run(TEN, speed=shared).step_seconds == pytest.approx(10 * (1 + 0.5 * 4) + 2)
    assert run(TEN, speed=shared, engines=2).step_seconds == pytest.approx(10 * (1 + 0.5 * 2) + 2)
    assert run(TEN, speed=shared, engines=4).step_seconds == pytest.approx(10 * (1 + 0.5 * 1) + 2)


def test_one_step_is_the_longer_of_both() -> None:
    found = run(TEN, mode="one-step", train_fixed=5.0, push=1.0)
    assert found.step_seconds == pytest.approx(10 + 1)
    assert found.staleness == {0: pytest.approx(0.1), 1: pytest.approx(0.9)}
    assert run(TEN, mode="one-step", train_fixed=25.0, push=1.0).step_seconds == pytest.approx(25 + 1)


def test_full_is_bound_by_the_slower_side() -> None:
    busy = run(TEN, mode="full", train_fixed=30.0, rollouts=30)
    assert busy.step_seconds == pytest.approx(30)
    assert busy.trainer_idle == pytest.approx(0, abs=1e-9)
    waiting = run(TEN, mode="full", train_fixed=1.0, concurrency=4, rollouts=30)
    assert waiting.step_seconds == pytest.approx(10, rel=0.05)
    assert waiting.trainer_idle == pytest.approx(0.9, rel=0.05)


@pytest.mark.parametrize("limit", [0, 1, 2, 4])
def test_staleness_stays_within_its_limit(limit: int) -> None:
    rng = random.Random(1)
    groups = [GroupWork(tuple(rng.randint(1, 200) for _ in range(4))) for _ in range(50)]
    for policy in ("recycle", "drop"):
        found = run(*groups, mode="full", train_fixed=20.0, staleness=limit, policy=policy, concurrency=64, rollouts=40)
        assert max(found.staleness) <= limit
    free = run(*groups, mode="full", train_fixed=20.0, concurrency=64, rollouts=40)
    assert max(free.staleness) > 4 or limit == 4
    assert free.wasted == 0


def test_surplus_is_wasted_unless_partial() -> None:
    groups = [GroupWork((10,)), GroupWork((10,)), GroupWork((100,))]
    sampling = {"over_sampling_batch_size": 3, "rollouts": 30}
    thrown, kept = run(*groups, **sampling), run(*groups, partial=True, **sampling)
    assert thrown.wasted > 0.2
    assert kept.wasted == 0
    assert max(kept.staleness) > 0 == max(thrown.staleness)


# -- closed form -------------------------------------------------------------------------------------------

PLACES, BATCH, PACE = 32, 128, 0.01


def long_tail() -> tuple[GroupWork, ...]:
    """Log-normal lengths, sigma 1, at most 12 medians."""
    rng = random.Random(0)
    return tuple(GroupWork((max(1, round(min(2400, 200 * math.exp(rng.gauss(0, 1))))),)) for _ in range(40 * BATCH))


@pytest.mark.parametrize("rho", [0.5, 1.0])
def test_async_gain_at_an_equal_budget(rho: float) -> None:
    """(1/eta + rho) / (1 + rho): rho = training over generation work, eta = tail efficiency of a rollout."""
    groups = long_tail()
    work = sum(g.tokens[0] for g in groups) / len(groups) * BATCH * PACE / PLACES
    plan = Plan(rollouts=20, rollout_batch_size=BATCH, concurrency=PLACES)
    eta = work / simulate(Workload(groups, Speed(PACE)), plan).step_seconds
    assert 0.35 < eta < 0.6
    sync = simulate(Workload(groups, Speed(PACE), train_fixed=rho * work), plan)
    generating = round(PLACES / (1 + rho))
    training = rho * work * PLACES / (PLACES - generating)
    split = Plan(mode="full", rollouts=20, rollout_batch_size=BATCH, concurrency=generating, buffer=2 * BATCH)
    full = simulate(Workload(groups, Speed(PACE), train_fixed=training), split)
    assert sync.step_seconds / full.step_seconds == pytest.approx((1 / eta + rho) / (1 + rho), rel=0.1)


@given(
    mode=st.sampled_from(["sync", "one-step", "full"]),
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=1, max_size=12),
    concurrency=st.integers(1, 16),
    over=st.integers(1, 8),
    partial=st.booleans(),
    accepted=st.sampled_from([1.0, 0.6]),
    staleness=st.sampled_from([None, 0, 2]),
    policy=st.sampled_from(["recycle", "drop", "mask"]),
    interval=st.integers(1, 3),
)
def test_every_plan_ends(
    mode: Any, lengths: list[list[int]], concurrency: int, over: int, partial: bool, accepted: float,
    staleness: int | None, policy: Any, interval: int,
) -> None:  # fmt: skip
    groups = [GroupWork(tuple(pair)) for pair in lengths]
    found = run(
        *groups, mode=mode, concurrency=concurrency, over_sampling_batch_size=over, partial=partial, accepted=accepted,
        staleness=staleness if mode == "full" else None, policy=policy, push_interval=interval, train_fixed=3.0,
        push=0.5, rollouts=6,
    )  # fmt: skip
    assert found.step_seconds >= 3.0
    assert sum(found.staleness.values()) == pytest.approx(1)
    assert 0 <= found.wasted <= 1
    assert 0 <= found.trainer_idle <= 1
