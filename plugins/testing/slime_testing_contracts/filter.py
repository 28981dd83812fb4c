"""The contract of dynamic sampling filters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

import pytest

from slime_core.sample import FilterDecision
from slime_testing_contracts.base import Contract
from slime_testing_contracts.samples import scored_group


class FilterContract(Contract):
    """A decision with a reason for every group that can come, and the group untouched."""

    kind = "filters"
    examples: ClassVar[Sequence[tuple[list[float | None], bool]]] = ()
    """(rewards of a group, whether it is kept)"""

    def decide(self, rewards: list[float | None]) -> FilterDecision | bool:
        """The filter's answer for a group with these rewards."""
        decision = self.resolved.obj(self.settings, scored_group(rewards))
        assert isinstance(decision, (FilterDecision, bool)), (
            f"a filter answers a FilterDecision or a bool; for rewards {rewards} it answered {decision!r}"
        )
        return decision

    def test_examples(self) -> None:
        """The author's examples hold."""
        for rewards, kept in self.examples:
            found = bool(self.decide(rewards))
            assert found is kept, (
                f"rewards {rewards}: the example says {'keep' if kept else 'drop'}, the filter does not"
            )

    @pytest.mark.parametrize(
        "rewards", [[0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0], [0.5], [None, 1.0], [None, None], [1e30, -1e30]], ids=repr
    )
    def test_every_group_gets_a_decision(self, rewards: list[float | None]) -> None:
        """Equal rewards, one sample, failed samples; a drop says why."""
        decision = self.decide(rewards)
        if isinstance(decision, FilterDecision) and not decision.keep:
            assert decision.reason, f"a drop says why: set `reason`, which the metrics count (rewards {rewards})"
            assert "/" not in decision.reason, "the reason becomes part of a metric's name"

    def test_fan_out_counts_once(self) -> None:
        """Copies of one execution change no decision: see docs/concepts/fan-out.md."""
        for rewards in ([0.0, 1.0, 1.0], [1.0, 1.0], [0.5], [0.0, None, 1.0]):
            group = scored_group(list(rewards))
            fanned = [copy.deepcopy(s) for s in group for _ in range(1 + (s.index or 0) % 3)]
            for sample in fanned:
                sample.rollout_id = sample.index
            plain, found = (self.resolved.obj(self.settings, g) for g in (group, fanned))
            assert found == plain, (
                f"rewards {rewards}: {plain!r}, and with siblings {found!r}; use slime_core.executions"
            )

    def test_the_group_is_left_alone(self) -> None:
        """Dropping is the rollout's."""
        group = scored_group([0.0, 1.0])
        before = [sample.to_dict() for sample in group]
        self.resolved.obj(self.settings, group)
        after = [sample.to_dict() for sample in group]
        assert after == before, "a filter decides and changes nothing: neither the list of samples nor a sample"
