from __future__ import annotations

from slime_rewards.random import reward

from slime_core import Sample
from slime_core.config import Args


def coins(seed: int, count: int = 4000) -> list[float]:
    args = Args(rollout_seed=seed)
    return [reward(args, Sample(group_index=i // 8, index=i, response=f"r{i}")) for i in range(count)]


def test_fair_repeatable_and_seeded() -> None:
    first = coins(1)
    assert set(first) == {0.0, 1.0}
    assert abs(sum(first) - 2000) < 5 * 4000**0.5 / 2  # five standard deviations
    assert coins(1) == first
    both = sum(a == b for a, b in zip(first, coins(2)))
    assert abs(both - 2000) < 5 * 4000**0.5 / 2


def test_the_response_has_no_say_but_tells_nameless_samples_apart() -> None:
    assert len({reward(Args(), Sample(group_index=0, index=3, response=str(i))) for i in range(50)}) == 1
    assert len({reward(Args(), Sample(response=str(i))) for i in range(50)}) == 2
