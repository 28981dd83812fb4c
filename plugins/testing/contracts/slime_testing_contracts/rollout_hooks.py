"""The contracts of the functions around a rollout: they see samples, and change only what is theirs to change."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from slime_core.errors import SlimeError
from slime_core.rollout.hooks import SampleHook
from slime_core.testing.base import Contract
from slime_core.types import Group, Sample, SampleStatus
from slime_testing_contracts.rollout import Prompts
from slime_testing_contracts.samples import answered_sample, scored_group


def finished_groups() -> list[Group]:
    """As a rollout ends with: different rewards, an empty answer, a truncated one, a failed one, and one removed."""
    groups = [scored_group([1.0, 0.0, 0.5], 0), scored_group([0.0, 0.0, 1.0], 1)]
    groups[0][1].status = SampleStatus.TRUNCATED
    failed = groups[1][1]
    failed.reset_for_retry()
    failed.group_index, failed.index, failed.status, failed.reward = 1, 101, SampleStatus.FAILED, None
    groups[1][2].remove_sample = True
    for group in groups:
        for sample in group:
            sample.metadata["source_name"] = "sums"
    return groups


def facts(groups: list[Group]) -> list[list[dict[str, Any]]]:
    """What the samples hold."""
    return [[copy.deepcopy(sample.to_dict()) for sample in group] for group in groups]


class SampleHookContract(Contract):
    """A finished sample in, a sample that can be trained on out."""

    kind = "sample_hooks"

    def call(self, sample: Sample, *, evaluation: bool = False) -> Sample:
        """The sample that the run goes on with."""
        hook = SampleHook(self.resolved.obj, self.component)
        try:
            return asyncio.run(hook.call(self.settings, sample, {"rollout_id": 0, "evaluation": evaluation}))
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    @pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
    @pytest.mark.parametrize(
        ("response", "status"),
        [("2", SampleStatus.COMPLETED), ("the ans", SampleStatus.TRUNCATED), ("", SampleStatus.COMPLETED)],
        ids=["completed", "truncated", "empty"],
    )
    def test_what_it_answers_can_be_trained_on(self, response: str, status: SampleStatus, evaluation: bool) -> None:
        """None, or a sample whose tokens, log-probs and mask are aligned; prompt, numbers and status are kept."""
        sample = answered_sample(response=response, status=status)
        prompt, index, group_index = list(sample.prompt_tokens), sample.index, sample.group_index
        found = self.call(sample, evaluation=evaluation)
        try:
            found.validate()
        except ValueError as error:
            pytest.fail(f"the sample cannot be trained on after the hook: {error}", pytrace=False)
        assert found.tokens[: len(prompt)] == prompt, "a sample hook must keep the prompt's tokens"
        assert (found.index, found.group_index) == (index, group_index), "a sample hook must keep index and group_index"
        assert found.status != SampleStatus.PENDING, "the sample is PENDING after the hook; it was finished before"

    def test_one_sample_at_a_time_or_many(self) -> None:
        """Calls that overlap give what calls in a row give."""
        texts = [f"answer {i}" for i in range(8)]
        hook = SampleHook(self.resolved.obj, self.component)

        async def together() -> list[Sample]:
            offered = {"rollout_id": 0, "evaluation": False}
            return await asyncio.gather(
                *(hook.call(self.settings, answered_sample(response=t), offered) for t in texts)
            )

        found = [sample.to_dict() for sample in asyncio.run(together())]
        in_turn = [self.call(answered_sample(response=text)).to_dict() for text in texts]
        assert found == in_turn, "calls that overlap gave other samples than calls one after the other"


class SampleFilterContract(Contract):
    """It marks samples with `remove_sample`, and nothing else."""

    kind = "sample_filters"

    def test_it_marks_and_nothing_else(self) -> None:
        """Groups and samples stay where they are; their rewards, tokens and texts as they are."""
        groups = finished_groups()
        before, members = facts(groups), [[id(s) for s in group] for group in groups]
        answer = self.resolved.obj(self.settings, groups)
        assert answer is None, f"it returned {type(answer).__name__}, which has no effect: set sample.remove_sample"
        assert [[id(s) for s in group] for group in groups] == members, (
            "groups or samples were taken out, added or moved; mark them with sample.remove_sample = True instead"
        )
        for group in groups:
            for sample in group:
                assert isinstance(sample.remove_sample, bool), (
                    f"sample {sample.index}: remove_sample is True or False; found {sample.remove_sample!r}"
                )
        for then, now in zip(before, facts(groups)):
            for one, other in zip(then, now):
                changed = sorted(k for k in other if k not in ("remove_sample", "metadata") and one.get(k) != other[k])
                assert not changed, f"sample {one['index']}: the filter changed {', '.join(changed)}"

    def test_a_rollout_of_one_sample(self) -> None:
        """And of none."""
        self.resolved.obj(self.settings, [scored_group([1.0])])
        self.resolved.obj(self.settings, [[]])


class AllSamplesProcessContract(Contract):
    """It looks at everything a rollout generated, and leaves it as it is."""

    kind = "all_samples_processes"

    def test_it_looks_and_does_not_touch(self) -> None:
        """Metadata is free to use; numbers, tokens, rewards and the groups themselves stay."""
        groups, source = finished_groups(), Prompts(3)
        before = facts(groups)
        answer = self.resolved.obj(self.settings, groups, source)
        assert answer is None, f"it returned {type(answer).__name__}, which has no effect"
        assert [len(group) for group in groups] == [len(group) for group in before], "groups or samples were removed"
        for then, now in zip(before, facts(groups)):
            for one, other in zip(then, now):
                changed = sorted(k for k in other if k != "metadata" and one.get(k) != other[k])
                assert not changed, f"sample {one['index']}: it changed {', '.join(changed)}"


class RolloutLogContract(Contract):
    """Metrics in, True (slime's own are left out) or False (they are added) out."""

    kind = "rollout_logs"

    @pytest.mark.parametrize("count", [1, 6])
    def test_it_says_whether_it_has_logged(self, count: int) -> None:
        """For any number of samples; the samples stay as they are, and what it adds to the metrics are numbers."""
        samples = [s for group in finished_groups() for s in group][:count]
        before, metrics = facts([samples]), {"rollout/other": 1.0}
        answer = self.resolved.obj(0, self.settings, samples, metrics, 1.5)
        _check_answer(answer, metrics)
        assert facts([samples]) == before, "logging changed the samples, which are still to be trained on"


class EvalLogContract(Contract):
    """The same for evaluations: `{data set: {"rewards", "truncated", "samples"}}`."""

    kind = "eval_logs"
    default_args: ClassVar[Mapping[str, Any]] = {"n_samples_per_eval_prompt": 1}

    def test_it_says_whether_it_has_logged(self) -> None:
        """For one data set with samples, one without any; the data stays as it is."""
        samples = scored_group([1.0, 0.0])
        held = {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": samples}
        data = {"held": held, "none": {"rewards": [], "truncated": [], "samples": []}}
        before, metrics = facts([samples]), {"eval/other": 1.0}
        _check_answer(self.resolved.obj(0, self.settings, data, metrics), metrics)
        assert held["rewards"] == [1.0, 0.0], "logging changed the rewards"
        assert facts([samples]) == before, "logging changed the samples"


def _check_answer(answer: Any, metrics: Mapping[str, Any]) -> None:
    assert answer is None or isinstance(answer, bool), (
        f"a log function returns True (slime's metrics are left out) or False; found {answer!r}"
    )
    wrong = {k: v for k, v in metrics.items() if not isinstance(v, (int, float)) or not math.isfinite(v)}
    assert not wrong, f"metrics are finite numbers; it left {wrong!r}"
