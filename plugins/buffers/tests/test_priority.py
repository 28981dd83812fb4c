from __future__ import annotations

import pytest
from slime_buffers.priority import Buffer

from slime_core import Sample, SampleStatus, SlimeError
from slime_core.config import Args


def make(**options: object) -> Buffer:
    return Buffer(Args(reward_key=None, plugins={"priority": options}))


def group(index: int, rewards: tuple[float | None, ...] = (None,), version: int | None = None) -> list[Sample]:
    made = []
    for reward in rewards:
        sample = Sample(group_index=index, index=index, tokens=[1], reward=reward)
        if version is not None:
            meta = {"finish_reason": {"type": "stop"}, "weight_version": version}
            sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
        made.append(sample)
    return made


def order(buffer: Buffer, count: int = 99) -> list[int | None]:
    return [g[0].group_index for g in buffer.take(count)]


def test_the_most_stale_first_by_default_and_the_freshest_on_request() -> None:
    versions = [3, 1, 2, 1]
    for weight, expected in ((1.0, [1, 3, 2, 0]), (-1.0, [0, 2, 1, 3]), (0.0, [0, 1, 2, 3])):
        buffer = make(staleness=weight)
        buffer.add([group(i, (1.0,), v) for i, v in enumerate(versions)])
        assert order(buffer) == expected


def test_by_reward() -> None:
    rewards: list[tuple[float | None, ...]] = [(0.0, 1.0), (1.0, 1.0), (0.0, None), (None, None)]
    buffer = make(reward=1.0, staleness=0.0)
    buffer.add([group(i, r, 0) for i, r in enumerate(rewards)])
    assert order(buffer) == [1, 0, 2, 3]


def test_both_terms_are_weighed() -> None:
    # 10 * reward + 1 * age, the newest version being 5: [10 * .1 + 5, 10 * .5 + 0, 10 * .3 + 3]
    buffer = make(reward=10.0, staleness=1.0)
    buffer.begin_rollout(0, 5)
    buffer.add([group(0, (0.1,), 0), group(1, (0.5,), 5), group(2, (0.3,), 2)])
    assert order(buffer) == [0, 2, 1]  # 6, 6, 5: equal ones by arrival


@pytest.mark.parametrize(("partial", "expected"), [("first", [2, 0, 1]), ("last", [0, 1, 2]), ("any", [0, 2, 1])])
def test_partial_groups(partial: str, expected: list[int]) -> None:
    buffer = make(partial=partial)
    interrupted = group(2, (None,), 3)
    interrupted[0].status = SampleStatus.ABORTED
    buffer.add([group(0, (1.0,), 1), group(1, (1.0,), 4), interrupted])
    assert order(buffer) == expected


def test_an_infinite_weight_is_refused() -> None:
    with pytest.raises(SlimeError, match=r"plugins\.priority\.reward"):
        make(reward=float("inf"))


def test_by_a_part_of_the_reward() -> None:
    buffer = make(reward=1.0, staleness=0.0, component="answer")
    groups = [group(i, (1.0 - i,), 0) for i in range(2)]
    for number, (sample,) in enumerate(groups):
        sample.reward_components = {"answer": float(number)}
    buffer.add(groups)
    assert order(buffer) == [1, 0]
