"""Contract tests for the conversion of samples to train data: reward post-processes, sample converters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from slime_core.errors import SlimeError
from slime_core.rollout.batch import make_batch
from slime_core.sample import Group, TrainBatch
from slime_testing_contracts.base import Contract
from slime_testing_contracts.hooks import facts, finished_groups
from slime_testing_contracts.samples import scored_group


class RewardPostProcessContract(Contract):
    """Check that the function returns (raw rewards, rewards), two lists of finite numbers, one per sample."""

    kind = "reward_post_processes"
    default_args: ClassVar[Mapping[str, Any]] = {"n_samples_per_prompt": 3, "rollout_batch_size": 2}

    def prepared(self, groups: list[Group]) -> list[Group]:
        """Return the groups, ready for the component; override if the component reads more than rewards."""
        return groups

    def batch(self, groups: list[Group]) -> TrainBatch:
        """Return the batch that training gets."""
        try:
            return make_batch(self.settings, 0, self.prepared(groups), None, post_process_rewards=self.resolved.obj)
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    @pytest.mark.parametrize(
        "rewards",
        [[[1.0, 0.0, 0.5], [0.0, 1.0, 1.0]], [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], [[-3.0, 1e6, 0.25], [0.5, 0.5, 1.0]]],
        ids=["different", "equal", "large"],
    )
    def test_every_sample_gets_two_numbers(self, rewards: list[list[float]]) -> None:
        """Check that both numbers are finite, also for groups whose rewards are all equal."""
        groups = self.prepared([scored_group([*row], g) for g, row in enumerate(rewards)])
        answer = self.resolved.obj(self.settings, [sample for group in groups for sample in group])
        assert isinstance(answer, (tuple, list)), f"expected (raw_rewards, rewards); found {type(answer).__name__}"
        assert len(answer) == 2, f"expected (raw_rewards, rewards); found {len(answer)} parts"
        lengths = [len(part) for part in answer]
        assert lengths == [6, 6], f"6 samples need 6 raw rewards and 6 rewards; found {lengths}"
        self.batch([scored_group([*row], g) for g, row in enumerate(rewards)])

    def test_samples_that_are_not_trained_on_are_not_asked_about(self) -> None:
        """Check a rollout with a failed and a removed sample: only the other samples are passed in."""
        self.batch(finished_groups())

    def test_the_samples_are_left_alone(self) -> None:
        """Check that samples do not change, because the rewards are returned."""
        groups = self.prepared([scored_group([1.0, 0.0, 0.5])])
        before = facts(groups)
        self.resolved.obj(self.settings, groups[0])
        assert facts(groups) == before, "it changed the samples; return the rewards instead"


class SampleConverterContract(Contract):
    """Check that columns have one row per sample and can be converted to a batch."""

    kind = "sample_converters"
    default_args: ClassVar[Mapping[str, Any]] = {"n_samples_per_prompt": 3, "rollout_batch_size": 2}

    def batch(self, groups: list[Group]) -> TrainBatch:
        """Return the batch that training gets."""
        try:
            return make_batch(self.settings, 0, groups, None, convert_samples=self.resolved.obj)
        except SlimeError as error:
            pytest.fail(str(error), pytrace=False)

    def groups(self) -> list[Group]:
        """Return two groups with one removed sample."""
        groups = [scored_group([1.0, 0.0, 0.5], 0), scored_group([0.0, 0.0, 1.0], 1)]
        groups[1][2].remove_sample = True
        return groups

    def test_a_batch_can_be_made_of_its_columns(self) -> None:
        """Check that `tokens`, `response_lengths`, `rewards` and `loss_masks` have a row per sample, rewards finite."""
        batch = self.batch(self.groups())
        assert len(batch) > 0, "no rows"
        wrong = [r for r in batch.rewards if not isinstance(r, (int, float)) or r != r or abs(r) == float("inf")]
        assert not wrong, f"rewards are finite numbers; found {wrong!r}"
        odd = [m for mask in batch.loss_masks for m in mask if m not in (0, 1)]
        assert not odd, f"loss masks hold 0 and 1; found {odd[:8]!r}"

    def test_a_removed_sample_is_not_trained_on(self) -> None:
        """Check that a removed sample has a loss mask of zeros or no row."""
        groups = self.groups()
        for sample in groups[0]:
            sample.remove_sample = True
        removed = sum(s.remove_sample for group in groups for s in group)
        batch = self.batch(groups)
        trained = sum(any(mask) for mask in batch.loss_masks)
        assert trained <= 6 - removed, f"{removed} of 6 samples have remove_sample set; {trained} rows are trained on"

    def test_the_samples_are_left_alone(self) -> None:
        """Check that samples do not change, because they are saved and logged later."""
        groups = self.groups()
        before = facts(groups)
        self.batch(groups)
        assert facts(groups) == before, "converting changed the samples"
