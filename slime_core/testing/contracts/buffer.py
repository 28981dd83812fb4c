"""The contract of buffer filters."""

from __future__ import annotations

import pytest

from slime_core.testing.contracts.base import Contract, scored_group
from slime_core.types import Group


class BufferContract(Contract):
    """Whole groups out of the buffer, at most as many as asked for, none twice and none lost."""

    kind = "buffers"

    def groups(self, count: int) -> list[Group]:
        """A buffer of `count` groups; override for a filter that needs more in them."""
        return [scored_group([0.0, 1.0, float(i)], group_index=i) for i in range(count)]

    @pytest.mark.parametrize(("held", "asked"), [(0, 3), (2, 3), (3, 3), (5, 3), (5, 0), (1, 1)])
    def test_takes_at_most_what_was_asked(self, held: int, asked: int) -> None:
        """What it returns has left the buffer; the rest is still there."""
        buffer = self.groups(held)
        before = {id(group): [id(sample) for sample in group] for group in buffer}
        taken = self.resolved.obj(self.settings, 0, buffer, asked)
        assert isinstance(taken, list)
        assert len(taken) <= asked
        ids = [id(group) for group in [*taken, *buffer]]
        assert len(set(ids)) == len(ids), "a group is in two places"
        assert set(ids) <= set(before), "groups are passed on as they are"
        for group in [*taken, *buffer]:
            assert [id(sample) for sample in group] == before[id(group)], "groups stay whole"

    def test_takes_something_when_it_can(self) -> None:
        """A filter that never gives anything back would keep groups for ever."""
        assert self.resolved.obj(self.settings, 0, self.groups(4), 2)

    def test_rollout_id_may_be_missing(self) -> None:
        """THUDM/slime passes None."""
        assert isinstance(self.resolved.obj(self.settings, None, self.groups(2), 1), list)
