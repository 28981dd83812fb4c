"""The user's functions around a rollout: what they are given, what they may return, how their errors read."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import RolloutError
from slime_core.protocols import EditTraits, declares
from slime_core.rollout.hooks import RolloutHooks
from slime_core.sample import Sample
from tests.hooks_with import hooks_with
from tests.unit.rollout.parts import Scorer, make_runner, rollout_args

ARGS = Args(rollout_timeout=5.0)
FLAG = "--rollout-sample-hook-path"


def _sample_hooks(*functions: Any) -> RolloutHooks:
    return RolloutHooks.of(hooks_with(*(("slime_sample_generated", function) for function in functions)))


def _run(*functions: Any, samples: list[Sample], args: Any = ARGS, evaluation: bool = False) -> list[Sample]:
    return asyncio.run(_sample_hooks(*functions).after_generation(args, samples, 3, evaluation))


def _done(index: int, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(index=index, status=status)


def test_plain_and_async_hooks_run_in_order_with_the_keywords_they_declare() -> None:
    seen = []

    def plain(args, sample, evaluation):
        seen.append(("plain", sample.index, evaluation))

    @declares(EditTraits(edits_samples=True))
    async def replaces(args, sample, *, rollout_id):
        seen.append(("async", sample.index, rollout_id))
        return Sample(index=sample.index + 10, status=sample.status)

    def takes_anything(args, sample, **keywords):
        seen.append(("any", sample.index, keywords))
        return sample

    found = _run(plain, replaces, takes_anything, samples=[_done(1), _done(2)], evaluation=True)
    assert [s.index for s in found] == [11, 12]
    assert seen[:3] == [("plain", 1, True), ("async", 1, 3), ("any", 11, {})]


@pytest.mark.parametrize("result", ["text", 1, [Sample()]])
def test_another_result_is_an_error_that_says_what_it_was(result: Any) -> None:
    with pytest.raises(RolloutError, match=rf"{FLAG} returned {type(result).__name__} for sample 7; expected a Sample"):
        _run(lambda args, sample: result, samples=[_done(7)])


@pytest.mark.parametrize("error", [KeyError("missing"), StopIteration(), SystemExit(3), TimeoutError("mine")])
@pytest.mark.parametrize("later", [False, True])
def test_a_hook_that_raises_fails_its_sample_and_no_other(error: BaseException, later: bool) -> None:
    def broken(args, sample):
        if sample.index == 4:
            raise error

    async def broken_later(args, sample):
        await asyncio.sleep(0)
        broken(args, sample)

    def never(args, sample):
        assert sample.index == 5
        sample.metadata["second"] = True

    samples = [_done(4), _done(5)]
    samples[0].reward = 1.0
    first, second = _run(broken_later if later else broken, never, samples=samples)
    failure = first.metadata["failure"]
    assert (first.status, first.reward) == (Sample.Status.FAILED, None)
    assert failure["where"] == FLAG
    assert type(error).__name__ in failure["error"] or "StopIteration" in failure["error"]
    assert "--rollout-timeout" not in failure["error"]
    if isinstance(error, KeyError):
        assert failure["error"] == "KeyError: 'missing'"
        assert "test_hooks.py:" in failure["at"]
    assert (second.status, second.metadata) == (Sample.Status.COMPLETED, {"second": True})


def test_an_endless_hook_fails_its_sample_at_the_deadline() -> None:
    async def endless(args, sample):
        await asyncio.Event().wait()

    (sample,) = _run(endless, samples=[_done(0)], args=Args(rollout_timeout=0.01))
    assert sample.status == Sample.Status.FAILED
    assert sample.metadata["failure"]["error"] == "error: not done within --rollout-timeout 0.01 s"


def test_the_filter_runs_before_all_samples_are_shown_with_the_real_source(caplog) -> None:
    calls: list[Any] = []
    source = object()

    def keep_first(args, groups):
        for group in groups:
            group[-1].remove_sample = True
        return groups

    def show(args, all_groups, data_source):
        calls.append(([s.remove_sample for g in all_groups for s in g], data_source))

    kept, dropped = [_done(0), _done(1)], [_done(2)]
    hooks = RolloutHooks.of(hooks_with(("slime_process_all_samples", show), ("slime_filter_samples", keep_first)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            hooks.after_rollout(ARGS, [kept], [kept, dropped], source, {})
    assert calls == [([False, True, False], source)] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "--rollout-sample-filter-path returned list, which has no effect; what may be changed is changed in place"
    ]


class FanOut:
    """A generate function: two siblings for even samples; an aborted answer at the first try of sample 3."""

    label = "generator 'fan out'"

    def __init__(self) -> None:
        self.tries: dict[int, int] = {}

    async def call(self, args, sample, sampling_params, *, evaluation=False, context=None):
        self.tries[sample.index] = self.tries.get(sample.index, 0) + 1
        first_of_three = sample.index == 3 and self.tries[3] == 1
        siblings = [copy.deepcopy(sample) for _ in range(2)] if sample.index % 2 == 0 else [sample]
        meta = {"finish_reason": {"type": "abort" if first_of_three else "stop"}}
        for sibling in siblings:
            sibling.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info=meta)
        return siblings if len(siblings) > 1 else siblings[0]


def test_fan_out_and_continued_samples_are_seen_once_before_their_reward() -> None:
    seen: list[tuple[int, int, bool]] = []
    scored: list[tuple[int | None, str]] = []

    async def note(args, sample, rollout_id, evaluation):
        await asyncio.sleep(0)
        seen.append((sample.index, rollout_id, evaluation))
        sample.metadata["note"] = f"{sample.metadata.get('note', '')}{rollout_id}"

    def score(sample: Sample) -> float:
        scored.append((sample.index, sample.metadata["note"]))
        return 1.0

    async def go() -> tuple[list[Sample], list[Sample]]:
        runner = make_runner(rollout_args(), FanOut(), Scorer(score), hooks=_sample_hooks(note))
        group = [Sample(group_index=0, index=i, tokens=[1], prompt="p") for i in (2, 3)]
        first = await runner.run_group(group, {}, rollout_id=7)
        again = await runner.run_group([first[-1]], {}, rollout_id=8)
        await runner.run_group([Sample(group_index=1, index=5, tokens=[1])], {}, rollout_id=8, evaluation=True)
        return first, again

    first, again = asyncio.run(go())
    assert [(s.index, s.rollout_id, s.metadata.get("note")) for s in first[:2]] == [(2, 2, "7"), (2, 2, "7")]
    assert (again[0].metadata["note"], again[0].response_length) == ("8", 2)  # not when it was aborted
    assert seen == [(2, 7, False), (2, 7, False), (3, 8, False), (5, 8, True)]
    assert scored == [(2, "7"), (2, "7"), (3, "8"), (5, "8")]
