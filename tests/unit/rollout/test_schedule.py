"""Scheduling of groups: what is accepted, dropped, given back, and in which order."""

from __future__ import annotations

import asyncio
import math

import pytest
from slime_runs.metrics import eval_metrics

from slime_core.errors import PluginError, RolloutError
from slime_core.rollout.pool import drawn_groups
from slime_core.rollout.stage import eval_output, train_output
from slime_core.sample import FilterDecision, RolloutFnTrainOutput, Sample
from tests.unit.rollout.parts import Scorer, Source, roll, rollout_args


class Generator:
    """Answers at once, or after the abort for the groups in `slow`."""

    label = "generator 'test'"

    def __init__(self, slow=(), broken=(), order=None) -> None:
        self.slow, self.broken, self.order, self.params, self.seen = set(slow), set(broken), order or {}, [], []

    async def call(self, args, sample, sampling_params, *, evaluation=False, context=None):
        self.params.append(dict(sampling_params))
        self.seen.append(sample.index)
        for _ in range(self.order.get(sample.group_index, 0)):
            await asyncio.sleep(0)
        if sample.group_index in self.broken:
            raise ValueError("no luck")
        reason = "stop"
        if sample.group_index in self.slow:
            await context.engine.aborted.wait()
            reason = "abort"
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": reason}})
        return sample


def _run(args, source, generator, *, scorer=None, keep=None):
    return asyncio.run(roll(args, generator, source, scorer=scorer, keep=keep))


def test_a_fallback_group_is_dropped_while_there_are_more_than_enough() -> None:
    source = Source()
    args = rollout_args(over_sampling_batch_size=3)
    out = _run(args, source, Generator(), keep=lambda a, g: FilterDecision(False, "bad", keep_when_insufficient=True))
    # THUDM/slime's rule: three left and two wanted drops one, two left and two wanted keeps both
    assert [g[0].group_index for g in out.samples] == [1, 2]
    assert source.draws == [3]
    assert out.metrics["rollout/dynamic_filter/drop_bad"] == 1
    assert out.metrics["rollout/dynamic_filter/kept_insufficient"] == 2


def _by_index(sample):
    """Group g has rewards 0 and g: the later, the wider apart."""
    return float(sample.group_index * (sample.index % 2))


@pytest.mark.parametrize(("spreads", "kept"), [(None, [4, 7, 8]), ((0, 3, 1, 2), [1, 4, 5])])
def test_a_spent_budget_may_be_filled_with_the_best_dropped_groups(
    spreads: tuple[float, ...] | None, kept: list[int]
) -> None:
    source = Source()
    args = rollout_args(rollout_batch_size=3, over_sampling_batch_size=3, dynamic_sampling_on_exhausted="keep")
    args.dynamic_sampling_budget = 3
    out = _run(
        args, source, Generator(), scorer=Scorer(_by_index),
        keep=lambda a, g: FilterDecision(
            g[0].group_index == 4, reason="odd_taste", spread=spreads and spreads[g[0].group_index % 4]
        ),
    )  # fmt: skip
    assert [g[0].group_index for g in out.samples] == kept
    assert (sum(source.draws), source.returned) == (9, [])
    assert out.metrics["rollout/dynamic_filter/drop_odd_taste"] == 8
    assert out.metrics["rollout/dynamic_filter/kept_exhausted"] == 2


def test_a_spent_budget_may_make_a_smaller_rollout_of_whole_steps() -> None:
    source = Source()
    args = rollout_args(rollout_batch_size=6, over_sampling_batch_size=6, global_batch_size=4, partial_rollout=True)
    args.dynamic_sampling_budget, args.dynamic_sampling_on_exhausted = 2, "shrink"
    out = _run(args, source, Generator(), keep=lambda a, g: g[0].group_index in (1, 3, 4, 7, 11))
    assert [g[0].group_index for g in out.samples] == [1, 3, 4, 7]
    assert [g[0].group_index for g in source.returned] == [11]
    assert source.returned[0][0].status == Sample.Status.COMPLETED
    assert out.metrics["rollout/surplus_groups"] == 1


@pytest.mark.parametrize("outcome", ["stop", "keep", "shrink"])
def test_no_outcome_can_make_something_of_nothing(outcome: str) -> None:
    args = rollout_args(dynamic_sampling_on_exhausted=outcome, global_batch_size=4, max_consecutive_failures=1000)
    with pytest.raises(RolloutError, match=r"20 groups drawn and only 0 of 2 kept.*failed.*--dynamic-sampling-budget"):
        _run(args, Source(), Generator(broken=range(100)))


def test_dropped_groups_are_shown_to_the_data_source() -> None:
    class Watching(Source):
        def __init__(self) -> None:
            super().__init__()
            self.observed = []

        def observe(self, groups, trained):
            self.observed += [(g[0].group_index, trained) for g in groups]

    source = Watching()
    _run(rollout_args(), source, Generator(), keep=lambda a, g: g[0].group_index > 1)
    assert source.observed == [(0, False), (1, False)]
    source = Watching()
    args = rollout_args(dynamic_sampling_on_exhausted="keep", dynamic_sampling_budget=2)
    out = _run(args, source, Generator(), scorer=Scorer(_by_index), keep=lambda a, g: False)
    assert [g[0].group_index for g in out.samples] == [2, 3]
    assert sorted(source.observed) == [(0, False), (1, False)], "those that were kept after all are not dropped"


@pytest.mark.parametrize(("partial", "mask"), [(False, False), (True, False), (True, True)])
def test_groups_that_finished_in_excess_are_kept_by_partial_rollout_only(partial: bool, mask: bool) -> None:
    source, generator = Source(), Generator()
    args = rollout_args(over_sampling_batch_size=4, partial_rollout=partial, mask_offpolicy_in_partial_rollout=mask)
    out = _run(args, source, generator)
    assert out.metrics["rollout/surplus_groups"] == 2
    assert out.metrics["rollout/surplus_groups_kept"] == (2 if partial and not mask else 0)
    assert [g[0].group_index for g in source.returned] == [2, 3]
    generator.seen.clear()
    again = _run(rollout_args(partial_rollout=partial, mask_offpolicy_in_partial_rollout=mask), source, generator)
    assert [g[0].group_index for g in again.samples] == [2, 3]
    assert generator.seen == ([] if partial and not mask else [4, 5, 6, 7]), "kept groups are not generated again"
    for group in again.samples:
        assert [s.reward for s in group] == [0.0, 1.0]
        assert all(s.loss_mask == [1] for s in group)


def test_finished_samples_of_an_interrupted_group_are_masked_too() -> None:
    class OneSlow(Generator):
        async def call(self, args, sample, params, *, evaluation=False, context=None):
            if sample.index == 0 and not sample.response_length:
                await context.engine.aborted.wait()
                sample.append_response_tokens(
                    tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}}
                )
                return sample
            return await super().call(args, sample, params, evaluation=evaluation, context=context)

    source = Source()
    args = rollout_args(over_sampling_batch_size=3, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    _run(args, source, OneSlow())
    group = _run(args, source, OneSlow()).samples[0]
    assert [s.loss_mask for s in group] == [[0, 1], [0]]
    assert [s.remove_sample for s in group] == [False, True], "with no token left it counts nowhere, as of old groups"


@pytest.mark.parametrize("ends", ["cancelled", "error"])
def test_a_rollout_that_ends_early_waits_for_no_reward(ends: str) -> None:
    """As ctrl-C does it, or failures in a row; the prompts are given back all the same."""
    source = Source()

    async def go() -> None:
        scoring = asyncio.Event()

        class Hanging(Scorer):
            async def score(self, samples, evaluation):
                if ends == "error" and samples[0].index == 3:
                    raise KeyError("broken")
                scoring.set()
                await asyncio.Event().wait()

        args = rollout_args(max_consecutive_failures=1)
        task = asyncio.create_task(roll(args, Generator(broken={1}), source, scorer=Hanging()))
        await scoring.wait()
        if ends == "cancelled":
            task.cancel()
        async with asyncio.timeout(60):
            await task

    with pytest.raises(asyncio.CancelledError if ends == "cancelled" else RolloutError):
        asyncio.run(go())
    assert 0 in [g[0].group_index for g in source.returned]
    assert all(s.status == Sample.Status.PENDING and not s.response_length for g in source.returned for s in g)


def test_failures_in_a_row_stop_the_run_with_the_reason() -> None:
    args = rollout_args(max_consecutive_failures=3)
    with pytest.raises(RolloutError, match=r"3 samples in a row failed.*generator 'test': ValueError: no luck"):
        _run(args, Source(), Generator(broken=range(100)))


def test_a_data_source_that_raises_is_named() -> None:
    class Broken(Source):
        def get_samples(self, num_samples):
            raise OSError("disk gone")

    with pytest.raises(PluginError, match="--data-source-path: get_samples raised OSError: disk gone"):
        _run(rollout_args(), Broken(), Generator())


def test_a_filter_that_raises_or_answers_nonsense_is_named_by_its_flag() -> None:
    def broken(args, group):
        raise KeyError("boom")

    with pytest.raises(
        PluginError, match=r"--dynamic-sampling-filter-path 'test' \(group 0\) raised KeyError: 'boom' \(at .*\.py:\d+"
    ):
        _run(rollout_args(), Source(), Generator(), keep=broken)
    with pytest.raises(RolloutError, match="--dynamic-sampling-filter-path 'test' returned str; expected a bool"):
        _run(rollout_args(), Source(), Generator(), keep=lambda args, group: "yes")


# -- what users' sources and rollout functions hand over -------------------------------------------------


def _groups(n: int, size: int = 2) -> list[list[Sample]]:
    return [[Sample() for _ in range(size)] for _ in range(n)]


def test_samples_without_numbers_get_unique_ones_that_a_resumed_run_gets_again() -> None:
    def numbers(rollout_id: int, drawn: int) -> list[tuple[int, int]]:
        groups = drawn_groups(_groups(3), 3, rollout_id, drawn)
        return [(s.group_index, s.index) for g in groups for s in g]

    first, later = numbers(0, 0), numbers(0, 3)
    assert numbers(0, 0) == first
    assert len({i for _, i in first + later + numbers(1, 0)}) == 18
    assert len({g for g, _ in first}) == 3


@pytest.mark.parametrize(
    ("answer", "found"),
    [(None, "NoneType"), ([], "returned 0"), (_groups(1), "returned 1"), ([Sample(), Sample()], "a list of 2 Sample"),
     ([[], []], "a list of 2 list"), ([["text"], ["text"]], "a group held a list of 1 str")],
)  # fmt: skip
def test_bad_answers_of_a_data_source(answer, found: str) -> None:
    with pytest.raises(RolloutError, match=f"--data-source-path: get_samples\\(2\\).*{found}"):
        drawn_groups(answer, 2, 0, 0)


def test_a_group_whose_samples_share_an_index_is_refused() -> None:
    with pytest.raises(RolloutError, match="share an index"):
        drawn_groups([[Sample(index=1), Sample(index=1)]], 1, 0, 0)


def test_rollout_functions_may_answer_with_groups_of_fan_out() -> None:
    a, b, c = Sample(index=0), Sample(index=1), Sample(index=2)
    assert train_output([[a, [b, c]]]).samples == [[a, b, c]]
    assert train_output(RolloutFnTrainOutput([a], {"x": 1.0})).metrics == {"x": 1.0}


@pytest.mark.parametrize("answer", [None, "text", {"a": 1}, [["text"]], [3]])
def test_bad_answers_of_a_rollout_function(answer) -> None:
    with pytest.raises(RolloutError, match="--rollout-function-path"):
        train_output(answer)


@pytest.mark.parametrize("answer", [None, [], {"held": [1, 2]}, {"held": {"truncated": []}}])
def test_bad_answers_of_an_eval_function(answer) -> None:
    with pytest.raises(RolloutError, match="--eval-function-path or --rollout-function-path: must return"):
        eval_output(answer)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf, "1.0"])
def test_rewards_of_an_eval_function_that_are_no_numbers_count_as_failed(lost, caplog) -> None:
    samples = [Sample(index=i, group_index=0, reward=r, status="completed") for i, r in enumerate((1.0, lost))]
    told = {"rewards": [1.0, lost], "truncated": [False, False], "samples": samples}
    alone = {"rewards": [1.0, lost], "truncated": [False, False]}
    data = eval_output({"told": told, "alone": alone}).data
    metrics = eval_metrics(data)
    for name in ("told", "alone"):
        assert (metrics[f"eval/{name}"], metrics[f"eval/{name}/failed_ratio"]) == (0.5, 0.5)
    assert metrics["eval/told-pass@2"] == 1.0
    assert [s.status for s in samples] == [Sample.Status.COMPLETED, Sample.Status.FAILED]
    assert "1 of 2 rewards of 'told' are no finite numbers (the first is number 1" in caplog.text
