from __future__ import annotations

import pytest
from slime_buffers.curriculum import Buffer

from slime_core import Sample, SlimeError
from slime_core.config import Args


def make(seed: int = 1, **options: object) -> Buffer:
    return Buffer(Args(reward_key=None, rollout_seed=seed, plugins={"curriculum": options}))


def scored(row: int | None, *rewards: float | None) -> list[Sample]:
    return [Sample(row=row, reward=reward) for reward in rewards]


def times_wanted(buffer: Buffer, row: int, tries: int) -> int:
    return sum(buffer.wants(Sample(row=row)) for _ in range(tries))


def test_prompts_in_the_band_and_unknown_ones_are_always_used() -> None:
    buffer = make()
    buffer.observe([scored(0, 1.0, 0.0, 0.0, 0.0, 0.0), scored(1, 1.0, 1.0, 1.0, 1.0, 0.0)], True)  # 0.2 and 0.8
    assert [times_wanted(buffer, row, 50) for row in (0, 1, 2)] == [50, 50, 50]
    assert buffer.wants(Sample(row=None))


def test_prompts_outside_the_band_are_mostly_skipped_and_counted() -> None:
    buffer = make(max_skips=1_000_000, skip_probability=0.75)
    buffer.observe([scored(0, 0.0, 0.0), scored(1, 1.0, 1.0)], False)
    used = [times_wanted(buffer, row, 2000) for row in (0, 1)]
    for count in used:  # binomial with n = 2000, p = 0.25: sd 19.4
        assert abs(count - 500) < 100
    assert buffer.take_metrics() == {
        "rollout/curriculum/skipped_hard": 2000.0 - used[0],
        "rollout/curriculum/skipped_easy": 2000.0 - used[1],
        "rollout/curriculum/known_prompts": 2.0,
    }


def test_no_prompt_starves() -> None:
    buffer = make(skip_probability=1.0, max_skips=4)
    buffer.observe([scored(0, 0.0)], True)
    assert [buffer.wants(Sample(row=0)) for _ in range(10)] == [False] * 4 + [True] + [False] * 4 + [True]


def test_the_rate_is_a_moving_average_over_trained_and_dropped_groups() -> None:
    buffer = make(rate_weight=0.25, low=0.5, high=0.6, skip_probability=1.0)
    buffer.observe([scored(0, 1.0, 1.0)], False)  # 1
    buffer.observe([scored(0, 0.0, 1.0, 0.5, 0.0)], True)  # 1 + .25 * (.25 - 1) = .8125
    assert not buffer.wants(Sample(row=0))
    buffer.observe([scored(0, 0.0, None)], True)  # .8125 * .75 = .609375
    assert not buffer.wants(Sample(row=0))
    buffer.observe([scored(0, 0.5, 0.5)], True)  # .457...
    assert not buffer.wants(Sample(row=0))
    buffer.observe([scored(0, 1.0)], True)  # .592...
    assert buffer.wants(Sample(row=0))
    ((row, rate),) = buffer.state_dict()["rates"]
    assert (row, rate) == (0, 0.609375 * 0.75 * 0.75 + 0.25)


def test_what_passes_is_told() -> None:
    buffer = make(pass_reward=0.0, skip_probability=1.0)
    buffer.observe([scored(0, -1.0, 0.0)], True)
    assert buffer.wants(Sample(row=0))


def test_an_empty_band_is_refused() -> None:
    with pytest.raises(SlimeError, match=r"low 0\.9 is above high 0\.8"):
        make(low=0.9)


def test_a_part_of_the_reward_may_be_what_passes() -> None:
    buffer = make(component="answer")
    buffer.observe([[Sample(row=0, reward=1.0, reward_components={"answer": right}) for right in (1.0, 0.0)]], True)
    ((row, rate),) = buffer.state_dict()["rates"]
    assert (row, rate) == (0, 0.5)
