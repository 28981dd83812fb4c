"""Buffers: the order of draws, skipped and kept groups, and the contract of their kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from slime_buffers.curriculum import Buffer as CurriculumBuffer
from slime_buffers.fifo import Buffer
from slime_buffers.priority import Buffer as PriorityBuffer
from slime_buffers.replay import Buffer as ReplayBuffer
from slime_buffers.stratified import Buffer as StratifiedBuffer
from slime_testing_contracts import suites

from slime_core import Sample, SampleStatus, SlimeError
from slime_core.config import Args

globals().update(suites("buffers", "slime_buffers", {}, globals()))


def test_oldest_first() -> None:
    groups = [[Sample(index=i)] for i in range(4)]
    buffer = Buffer(None)
    buffer.add(groups)
    assert [buffer.take(n) for n in (3, 0, 5)] == [groups[:3], [], groups[3:]]


def make(**options: object) -> PriorityBuffer:
    return PriorityBuffer(Args(reward_key=None, plugins={"priority": options}))


def group(index: int, rewards: tuple[float | None, ...] = (None,), version: int | None = None) -> list[Sample]:
    made = []
    for reward in rewards:
        sample = Sample(group_index=index, index=index, tokens=[1], reward=reward)
        if version is not None:
            meta = {"finish_reason": {"type": "stop"}, "weight_version": version}
            sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
        made.append(sample)
    return made


def order(buffer: PriorityBuffer, count: int = 99) -> list[int | None]:
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


def test_by_a_part_of_the_reward() -> None:
    buffer = make(reward=1.0, staleness=0.0, component="answer")
    groups = [group(i, (1.0 - i,), 0) for i in range(2)]
    for number, (sample,) in enumerate(groups):
        sample.reward_components = {"answer": float(number)}
    buffer.add(groups)
    assert order(buffer) == [1, 0]


def make_stratified(**options: object) -> StratifiedBuffer:
    return StratifiedBuffer(Args(plugins={"stratified": options}))


def prompt(source: str | None, row: int | None = None) -> Sample:
    return Sample(row=row, metadata={} if source is None else {"source_name": source})


def sources(groups: list[list[Sample]]) -> str:
    return "".join(g[0].metadata.get("source_name", "-") for g in groups)


def test_waiting_groups_come_in_turns() -> None:
    buffer = make_stratified()
    buffer.add([[prompt(name)] for name in "aaaaabbc"])
    assert sources(buffer.take(6)) == "abcaba"
    assert sources(buffer.take(9)) == "aa"


def test_given_shares() -> None:
    buffer = make_stratified(shares={"a": 3, "b": 1})
    buffer.add([[prompt(name)] for name in "a" * 60 + "b" * 60])
    assert Counter(sources(buffer.take(40))) == {"a": 30, "b": 10}


def test_a_source_that_comes_anew_has_no_credit() -> None:
    buffer = make_stratified()
    buffer.add([[prompt("a")] for _ in range(50)])
    buffer.take(40)
    buffer.add([[prompt("b")] for _ in range(10)])
    assert Counter(sources(buffer.take(8))) == {"a": 4, "b": 4}


def test_groups_without_a_source_are_one_of_their_own() -> None:
    buffer = make_stratified(shares={"": 2.0})
    buffer.add([[prompt(name)] for name in (None, None, None, None, "a", "a")])
    assert Counter(sources(buffer.take(3))) == {"-": 2, "a": 1}


def test_every_prompt_is_used_in_the_end() -> None:
    buffer, used, data = make_stratified(max_passes=3, look_ahead=1000), Counter(), "a" * 20 + "b"
    for _epoch in range(8):
        for row, source in enumerate(data):
            used[row] += buffer.wants(prompt(source, row))
    assert min(used.values()) >= 2, "passed over three times at most, in eight epochs"


def make_curriculum(seed: int = 1, **options: object) -> CurriculumBuffer:
    return CurriculumBuffer(Args(reward_key=None, rollout_seed=seed, plugins={"curriculum": options}))


def scored(row: int | None, *rewards: float | None) -> list[Sample]:
    return [Sample(row=row, reward=reward) for reward in rewards]


def times_wanted(buffer: CurriculumBuffer, row: int, tries: int) -> int:
    return sum(buffer.wants(Sample(row=row)) for _ in range(tries))


def test_prompts_in_the_band_and_unknown_ones_are_always_used() -> None:
    buffer = make_curriculum()
    buffer.observe([scored(0, 1.0, 0.0, 0.0, 0.0, 0.0), scored(1, 1.0, 1.0, 1.0, 1.0, 0.0)], True)  # 0.2 and 0.8
    assert [times_wanted(buffer, row, 50) for row in (0, 1, 2)] == [50, 50, 50]
    assert buffer.wants(Sample(row=None))


def test_prompts_outside_the_band_are_mostly_skipped_and_counted() -> None:
    buffer = make_curriculum(max_skips=1_000_000, skip_probability=0.75)
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
    buffer = make_curriculum(skip_probability=1.0, max_skips=4)
    buffer.observe([scored(0, 0.0)], True)
    assert [buffer.wants(Sample(row=0)) for _ in range(10)] == [False] * 4 + [True] + [False] * 4 + [True]


def test_the_rate_is_a_moving_average_over_trained_and_dropped_groups() -> None:
    buffer = make_curriculum(rate_weight=0.25, low=0.5, high=0.6, skip_probability=1.0)
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


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (make, {"reward": float("inf")}, r"plugins\.priority\.reward"),
        (make_stratified, {"shares": {"a": 0}}, r"plugins\.stratified\.shares\.a"),
        (make_curriculum, {"low": 0.9}, r"low 0\.9 is above high 0\.8"),
    ],
)
def test_options_that_cannot_work(build: Callable[..., object], options: dict[str, object], message: str) -> None:
    with pytest.raises(SlimeError, match=message):
        build(**options)


def test_a_part_of_the_reward_may_be_what_passes() -> None:
    buffer = make_curriculum(component="answer")
    buffer.observe([[Sample(row=0, reward=1.0, reward_components={"answer": right}) for right in (1.0, 0.0)]], True)
    ((row, rate),) = buffer.state_dict()["rates"]
    assert (row, rate) == (0, 0.5)


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
    buffer = ReplayBuffer(args())
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
        buffer = ReplayBuffer(args(options={"max_uses": max_uses, "max_age": 100}))
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
    buffer = ReplayBuffer(args(options={"share": 0.5, "max_uses": 9}))
    buffer.observe([trained(i, 0) for i in range(6)], True)
    buffer.begin_rollout(1, 1)
    waiting = [[Sample(group_index=10)], [Sample(group_index=11)]]
    buffer.add(waiting)
    assert indices(buffer.take(3)) == [0, 1, 10]
    assert indices(buffer.take(3)) == [11]
    buffer.begin_rollout(2, 2)
    assert indices(buffer.take(1) + buffer.take(9)) == [2, 3]


def test_old_groups_go() -> None:
    buffer = ReplayBuffer(args(options={"max_age": 2, "max_uses": 9}))
    buffer.observe([trained(0, 1)], True)
    buffer.begin_rollout(1, 3)
    assert indices(buffer.take(4)) == [0]
    buffer.begin_rollout(2, 4)
    assert buffer.take(4) == []
    assert buffer.take_metrics()["rollout/replay/kept_groups"] == 0


def test_the_newest_come_first_and_capacity_drops_the_oldest() -> None:
    buffer = ReplayBuffer(args(options={"share": 0.75, "capacity": 3}))
    buffer.observe([trained(i, i) for i in range(4)], True)
    buffer.begin_rollout(4, 4)
    assert indices(buffer.take(4)) == [3, 2, 1]


def test_a_replayed_group_that_was_not_used_comes_again() -> None:
    buffer = ReplayBuffer(args())
    buffer.observe([trained(0, 0)], True)
    buffer.begin_rollout(1, 1)
    (again,) = buffer.take(4)
    for sample in again:
        sample.reset_for_retry()
    buffer.add([again])
    assert len(buffer) == 0, "it does not wait to be generated"
    assert indices(buffer.take(4)) == [0]


def test_only_whole_groups_that_were_trained_on_are_kept() -> None:
    buffer = ReplayBuffer(args())
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
        ReplayBuffer(args(**changes))
    ReplayBuffer(args(use_tis=False, use_rollout_logprobs=True))
    ReplayBuffer(args(use_tis=False, options={"uncorrected": True}))
