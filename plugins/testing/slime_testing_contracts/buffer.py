"""The contract of buffers, for THUDM/slime's filter functions and for classes with the methods of `BufferBase`."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from slime_data.buffer_functions import FilteredList

from slime_core.plugins.signatures import construct
from slime_core.sample import Group, Sample, SampleStatus
from slime_testing_contracts.base import Contract
from slime_testing_contracts.samples import scored_group


class BufferContract(Contract):
    """A buffer returns whole groups, at most as many as requested, none twice and none lost; the same after a resume.

    A class may return groups that were not given back (replay) as its own objects; the tests do not count them.
    """

    kind = "buffers"
    default_args: ClassVar[Mapping[str, Any]] = {
        "reward_key": None,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 3,
        "rollout_seed": 1,
        "use_tis": True,
        "use_rollout_logprobs": False,
        "mask_offpolicy_in_partial_rollout": False,
    }

    def groups(self, count: int) -> list[Group]:
        """Return `count` groups; override it for a buffer whose groups need more fields."""
        made = [scored_group([0.0, 1.0, float(i)], group_index=i) for i in range(count)]
        for row, group in enumerate(made):
            for sample in group:
                sample.row = row
                sample.metadata["source_name"] = f"source {row % 2}"
        return made

    def build(self) -> Any:
        """Build the buffer, with the methods of `BufferBase` for functions and classes alike."""
        found = self.resolved.obj
        built = construct(found, self.settings) if inspect.isclass(found) else found
        return built if hasattr(built, "take") else FilteredList(self.settings, built, self.component)

    @pytest.mark.parametrize(("held", "asked"), [(0, 3), (2, 3), (3, 3), (5, 3), (5, 0), (1, 1)])
    def test_takes_at_most_what_was_asked(self, held: int, asked: int) -> None:
        """Check that `take` removes the returned groups from the buffer and keeps the rest."""
        buffer, groups = self.build(), self.groups(held)
        before = {id(group): [id(sample) for sample in group] for group in groups}
        buffer.add(list(groups))
        taken = buffer.take(asked) if asked else []
        assert isinstance(taken, list), f"expected a list of groups; found {type(taken).__name__}"
        assert len(taken) <= asked, f"{asked} groups were asked for, {len(taken)} came"
        assert len({id(group) for group in taken}) == len(taken), "a group was returned twice"
        assert len(buffer) <= held - len(taken), "a group is in two places"
        for group in taken:
            assert [id(sample) for sample in group] == before.get(id(group)), "groups are passed on whole, as they are"

    def test_takes_something_when_it_can(self) -> None:
        """Check that the buffer returns groups at all: otherwise it would keep groups forever."""
        buffer = self.build()
        buffer.add(self.groups(4))
        assert buffer.take(2), "4 groups wait, 2 are asked for, and none comes"

    def test_groups_wait_for_their_turn(self) -> None:
        """Check that every group comes once if drawn in small numbers, unless a filter function dropped it."""
        buffer = self.build()
        buffer.add(self.groups(7))
        seen: list[int | None] = []
        while taken := buffer.take(2):
            seen += [group[0].group_index for group in taken]
        assert len(set(seen)) == len(seen), f"a group came twice: {seen}"
        dropped = getattr(buffer, "num_dropped", 0)
        assert len(seen) + dropped + len(buffer) == 7, (
            f"of 7 groups {len(seen)} came out, {dropped} were dropped and {len(buffer)} wait: some are lost"
        )

    def test_rollout_id_may_be_missing(self) -> None:
        """Check rollout id None: THUDM/slime passes it, and a user's rollout function may draw without a rollout."""
        buffer = self.build()
        buffer.add(self.groups(2))
        assert isinstance(buffer.take(1), list)

    def test_unfinished_groups_are_taken_too(self) -> None:
        """Check that the buffer returns partial and untouched groups, which have no rewards."""
        buffer, (partial, fresh) = self.build(), self.groups(2)
        for sample in fresh:
            sample.reset_for_retry()
        partial[0].status, partial[0].reward = SampleStatus.ABORTED, None
        buffer.add([partial, fresh])
        assert len(buffer.take(2)) == 2, "a partial and a fresh group wait; both must come, though they have no rewards"

    def test_some_prompt_is_wanted(self) -> None:
        """Check that `wants` accepts a repeated prompt at least sometimes."""
        buffer = self.build()
        buffer.begin_rollout(0, 0)
        prompt = Sample(row=0, prompt="1+1=", tokens=[1], metadata={"source_name": "source 0"})
        assert any(buffer.wants(prompt) for _ in range(1000)), (
            "wants() declined one prompt 1000 times: none would be used"
        )

    def test_going_on_from_its_state_changes_nothing(self) -> None:
        """Check that a buffer and a copy made from its state (through JSON) return the same for the same calls."""
        buffer, rng = self.build(), random.Random(0)
        for rollout_id in range(4):
            self._rollout(buffer, rollout_id, rng)
        stored = json.loads(json.dumps(buffer.state_dict()))
        restored = self.build()
        restored.load_state_dict(stored)
        assert json.loads(json.dumps(restored.state_dict())) == stored, "its state is another one after loading it"
        state = rng.getstate()
        expected = [self._rollout(buffer, rollout_id, rng) for rollout_id in range(4, 10)]
        rng.setstate(state)
        found = [self._rollout(restored, rollout_id, rng) for rollout_id in range(4, 10)]
        assert found == expected, "after a resume it answers otherwise than it would have without"

    def _rollout(self, buffer: Any, rollout_id: int, rng: random.Random) -> list[Any]:
        """Make one rollout's calls, chosen by `rng`, and return the buffer's answers."""
        buffer.begin_rollout(rollout_id, rollout_id)
        taken = buffer.take(3)
        fresh = self.groups(20)[2 * rollout_id : 2 * rollout_id + 2]
        answers: list[Any] = [[s.to_dict() for s in group] for group in taken]
        answers += [bool(buffer.wants(group[0])) for group in self.groups(8)]
        for group in fresh:
            for sample in group:
                sample.reward = float(rng.random() < 0.5)
                sample.token_weight_versions = [rollout_id] * sample.response_length
        back = [group for group in [*taken, *fresh] if rng.random() < 0.5]
        rest = [group for group in [*taken, *fresh] if not any(group is other for other in back)]
        buffer.add(back)
        for group in rest:
            buffer.observe([group], rng.random() < 0.5)
        return [*answers, buffer.take_metrics(), len(buffer)]
