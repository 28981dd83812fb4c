from __future__ import annotations

import pytest
from slime_buffers.replay import Buffer

from slime_core import Sample, SlimeError
from slime_core.config import Args


def args(**changes: object) -> Args:
    options = changes.pop("options", {"share": 0.5})
    base = {"rollout_batch_size": 4, "rollout_seed": 1, "use_tis": True}
    return Args(plugins={"replay": options}, **{**base, **changes})


def trained(index: int, version: int) -> list[Sample]:
    group = []
    for i in range(2):
        sample = Sample(group_index=index, index=2 * index + i, tokens=[1], reward=float(i))
        meta = {"finish_reason": {"type": "stop"}, "weight_version": version}
        sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -0.25], meta_info=meta)
        group.append(sample)
    return group


def indices(groups: list[list[Sample]]) -> list[int | None]:
    return [g[0].group_index for g in groups]


def test_trained_groups_come_again_as_they_were() -> None:
    buffer = Buffer(args())
    group = trained(0, 3)
    buffer.observe([group], True)
    kept = [s.to_dict() for s in group]
    group[0].remove_sample, group[0].tokens[1] = True, 99  # the run's own copy goes on its way
    buffer.begin_rollout(1, 4)
    (again,) = buffer.take(4)
    for sample, before in zip(again, kept, strict=True):
        assert sample.metadata.pop("replayed") == 1
        assert sample.to_dict() == before
        assert (sample.rollout_log_probs, sample.token_weight_versions) == ([-1.0, -0.25], [3, 3])


def test_a_group_is_replayed_no_more_often_than_allowed() -> None:
    for max_uses in (1, 3):
        buffer = Buffer(args(options={"max_uses": max_uses, "max_age": 100}))
        buffer.observe([trained(0, 0)], True)
        uses = 0
        for rollout in range(1, 8):
            buffer.begin_rollout(rollout, rollout)
            taken = buffer.take(4)
            buffer.observe(taken, True)
            uses += len(taken)
            assert buffer.take_metrics()["rollout/replayed_groups"] == len(taken)
        assert uses == max_uses


def test_a_rollout_has_its_share_and_no_group_twice() -> None:
    buffer = Buffer(args(options={"share": 0.5, "max_uses": 9}))
    buffer.observe([trained(i, 0) for i in range(6)], True)
    buffer.begin_rollout(1, 1)
    waiting = [[Sample(group_index=10)], [Sample(group_index=11)]]
    buffer.add(waiting)
    assert indices(buffer.take(3)) == [0, 1, 10]
    assert indices(buffer.take(3)) == [11]
    buffer.begin_rollout(2, 2)
    assert indices(buffer.take(1) + buffer.take(9)) == [2, 3]


def test_old_groups_go() -> None:
    buffer = Buffer(args(options={"max_age": 2, "max_uses": 9}))
    buffer.observe([trained(0, 1)], True)
    buffer.begin_rollout(1, 3)
    assert indices(buffer.take(4)) == [0]
    buffer.begin_rollout(2, 4)
    assert buffer.take(4) == []
    assert buffer.take_metrics()["rollout/replay/kept_groups"] == 0


def test_the_newest_come_first_and_capacity_drops_the_oldest() -> None:
    buffer = Buffer(args(options={"share": 0.75, "capacity": 3}))
    buffer.observe([trained(i, i) for i in range(4)], True)
    buffer.begin_rollout(4, 4)
    assert indices(buffer.take(4)) == [3, 2, 1]


def test_a_replayed_group_that_was_not_used_comes_again() -> None:
    buffer = Buffer(args())
    buffer.observe([trained(0, 0)], True)
    buffer.begin_rollout(1, 1)
    (again,) = buffer.take(4)
    for sample in again:
        sample.reset_for_retry()
    buffer.add([again])
    assert len(buffer) == 0, "it does not wait to be generated"
    assert indices(buffer.take(4)) == [0]


def test_only_whole_groups_that_were_trained_on_are_kept() -> None:
    buffer = Buffer(args())
    failed, unscored, blind = trained(0, 0), trained(1, 0), trained(2, 0)
    failed[0].fail("reward", "no")
    unscored[1].reward = None
    blind[0].rollout_log_probs = None
    buffer.observe([failed, unscored, blind], True)
    buffer.observe([trained(3, 0)], False)
    buffer.begin_rollout(1, 1)
    assert buffer.take(4) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_tis": False}, r"needs --use-tis or --use-rollout-logprobs.*plugins\.replay\.uncorrected=true"),
        ({"mask_offpolicy_in_partial_rollout": True}, "--mask-offpolicy-in-partial-rollout excludes"),
        ({"options": {"share": 0.1}}, r"plugins\.replay\.share 0\.1 of --rollout-batch-size 4 is less than one group"),
        ({"options": {"max_uses": 0}}, r"plugins\.replay\.max_uses"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(SlimeError, match=message):
        Buffer(args(**changes))
    Buffer(args(use_tis=False, use_rollout_logprobs=True))
    Buffer(args(use_tis=False, options={"uncorrected": True}))
