"""The contract of data sources: groups in a fixed order, returned groups first, and the same order after a resume."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime_core.errors import RolloutError
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args
from slime_core.rollout.pool import drawn_groups
from slime_core.rollout.stage import RolloutParts, RolloutStage
from slime_core.sample import Group, SampleStatus
from slime_testing_contracts.base import Contract
from slime_testing_contracts.tiny import tiny_model, write_rows


class DataSourceContract(Contract):
    """Contract of data sources: groups pass the rollout stage's check, and the stage stores and resumes the source."""

    kind = "data_sources"
    num_rows: ClassVar[int] = 6
    """Number of rows in the data file; the suite draws more groups than rows."""
    default_args: ClassVar[Mapping[str, Any]] = {
        "n_samples_per_prompt": 3, "rollout_batch_size": 4, "rollout_shuffle": True, "input_key": "input",
        "label_key": "label", "rollout_seed": 7,
    }  # fmt: skip

    @property
    def settings(self) -> Args:
        """Settings with a data file, a model for its tokenizer, and a folder for the source's saved state."""
        assert self.folder is not None
        data, saved = write_rows(self.folder / "train.jsonl", self.num_rows), str(self.folder / "saved")
        files = {"prompt_data": str(data), "hf_checkpoint": str(tiny_model()), "save": saved, "load": saved}
        return super().settings.model_copy(update={**files, **self.args})

    def build(self, **changes: Any) -> Any:
        """Build a source as the launcher does."""
        return construct(self.resolved.obj, self.settings.model_copy(update=changes))

    def draw(self, source: Any, count: int, rollout_id: int = 0) -> list[Group]:
        """Draw `count` groups, checked as the rollout checks them."""
        try:
            return drawn_groups(source.get_samples(count), count, rollout_id, 0)
        except RolloutError as error:
            pytest.fail(str(error), pytrace=False)

    @pytest.mark.parametrize("size", [1, 3])
    def test_groups_are_as_many_and_as_large_as_asked(self, size: int) -> None:
        """`get_samples(n)` returns n groups of `--n-samples-per-prompt` samples without responses."""
        groups = self.draw(self.build(n_samples_per_prompt=size), 4)
        sizes = [len(group) for group in groups]
        assert sizes == [size] * 4, f"--n-samples-per-prompt {size}: the groups have {sizes} samples"
        for sample in (sample for group in groups for sample in group):
            assert sample.status == SampleStatus.PENDING, f"a new sample is PENDING; one was {sample.status.value}"
            assert sample.response_length == 0, f"a new sample has no response; one had {sample.response_length} tokens"

    def test_samples_of_a_group_share_nothing(self) -> None:
        """Changing a sample's tokens or metadata leaves its siblings unchanged."""
        first, *siblings = self.draw(self.build(), 1)[0]
        before = [sibling.to_dict() for sibling in siblings]
        first.tokens.append(1)
        first.metadata["changed"] = True
        assert [s.to_dict() for s in siblings] == before, "samples of a group share a list or a mapping; copy them"

    def test_numbers_are_given_once(self) -> None:
        """Across epochs, no two groups share a `group_index`, no two samples share an `index`; one prompt per group."""
        source = self.build()
        groups = [group for rollout_id in range(5) for group in self.draw(source, 4, rollout_id)]
        numbers = [sample.index for group in groups for sample in group]
        assert len(set(numbers)) == len(numbers), f"20 groups: indices came twice: {sorted(_twice(numbers))[:8]}"
        names = [group[0].group_index for group in groups]
        assert len(set(names)) == len(names), f"20 groups: group indices came twice: {sorted(_twice(names))[:8]}"
        for group in groups:
            assert all(s.prompt == group[0].prompt for s in group), "the samples of a group have one prompt"

    def test_the_order_is_the_settings(self) -> None:
        """Two sources with the same settings draw the same groups."""
        one, other = self.draw(self.build(), 9), self.draw(self.build(), 9)
        assert _facts(one) == _facts(other), "two sources with the same --rollout-seed drew different groups"

    def test_how_many_at_a_time_does_not_matter(self) -> None:
        """Drawing nine groups at once gives the same groups as drawing three times three."""
        source = self.build()
        apart = [group for _ in range(3) for group in self.draw(source, 3)]
        assert _facts(apart) == _facts(self.draw(self.build(), 9)), "drawing 3 times 3 gave other groups than 9 at once"

    def test_what_is_given_back_comes_first(self) -> None:
        """Groups that a rollout did not use are drawn again before new ones."""
        source = self.build()
        back = self.draw(source, 4)[2:]
        expected = {str(group[0].index) for group in back}
        source.add_samples(copy.deepcopy(back))
        found = {str(group[0].index) for group in self.draw(source, 2)}
        assert found == expected, f"samples {sorted(expected)} were given back, but {sorted(found)} came next"

    def test_a_resumed_source_goes_on(self) -> None:
        """A source saved and loaded by a checkpoint draws the same groups, with a returned group and across epochs."""
        source = self.build()
        assert hasattr(source, "state_dict") or hasattr(source, "save"), (
            "a data source needs state_dict() and load_state_dict(state), or save(rollout_id) and load(rollout_id);"
            " without, no checkpoint can be written"
        )
        drawn = self.draw(source, self.num_rows - 1)
        source.add_samples(drawn[3:])
        directory = Path(str(self.folder), "checkpoint")
        directory.mkdir()
        self._stage(source).save(directory, 0)
        expected = [_facts(self.draw(source, 4, rollout_id)) for rollout_id in range(1, 4)]
        resumed = self.build()
        self._stage(resumed).load(directory, 0)
        found = [_facts(self.draw(resumed, 4, rollout_id)) for rollout_id in range(1, 4)]
        assert found == expected, "after a resume the source draws other groups than it would have without"

    def test_its_state_comes_back_as_it_was(self) -> None:
        """`state_dict` after `load_state_dict` returns the loaded state."""
        source = self.build()
        if not hasattr(source, "state_dict"):
            pytest.skip("it has save and load instead of a state_dict")
        source.add_samples(self.draw(source, 3)[1:])
        state = json.loads(json.dumps(source.state_dict()))
        resumed = self.build()
        resumed.load_state_dict(copy.deepcopy(state))
        again = json.loads(json.dumps(resumed.state_dict()))
        differ = sorted(key for key in {*state, *again} if state.get(key) != again.get(key))
        assert not differ, f"saved, loaded and saved again, its state differs in {', '.join(differ)}"

    def _stage(self, source: Any) -> RolloutStage:
        return RolloutStage(self.settings, RolloutParts(source, _no_rollout, None))


def _no_rollout(*_: Any) -> Any:
    raise AssertionError("this stage saves and loads only")


def _facts(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[json.loads(json.dumps(sample.to_dict())) for sample in group] for group in groups]


def _twice(values: list[int | None]) -> set[int]:
    return {value for value in values if value is not None and values.count(value) > 1}
