from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_testing_contracts import DataSourceContract, EnvironmentContract, RecipeContract, RewardContract
from slime_testing_contracts.samples import answered_sample

from slime_core import RewardCaller, Sample

ANSWER = "214"
ENTRY = {"question": "57 + 87 + 70 =", "answer": ANSWER, "metadata": {"source_dataset": "chain_sum", "source_index": 0}}
ITEM = {"reasoning_gym": {"spec": {"name": "chain_sum", "config": {"seed": 3, "size": 5}}, "index": 0, "entry": ENTRY}}
"""Written out: to make it takes the import of reasoning_gym, a second in each process that collects the tests."""


class TestSource(DataSourceContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"task": "basic_arithmetic", "size": 6}}}


class TestCompositeSource(DataSourceContract):
    component = "reasoning_gym"
    args = {
        "plugins": {
            "reasoning_gym": {
                "task": "composite",
                "size": 6,
                "datasets": [
                    {"name": "leg_counting", "weight": 2.0, "config": {"max_animals": 3}},
                    {"name": "spell_backward"},
                ],
            }
        }
    }


class TestCurriculumSource(DataSourceContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"size": 6, "curriculum": True, "level_window": 2}}}

    def rollouts(self, source: Any, rewards: list[float]) -> list[int]:
        """Rollouts of one group each, all of whose samples get the reward; the level of each."""
        levels = []
        for number, reward in enumerate(rewards):
            source.begin_rollout(number, number)
            (group,) = source.get_samples(1)
            for sample in group:
                sample.reward, sample.status = reward, Sample.Status.COMPLETED
            source.observe([group], True)
            levels.append(group[0].metadata["reasoning_gym"]["level"])
            assert source.take_metrics()["rollout/reasoning_gym/level"] == levels[-1]
        return levels

    def test_the_level_moves_with_recent_success_and_is_resumed(self) -> None:
        rewards = [1.0, 0.5, 1.0, 0.9, 0.0, 1.0, 0.1, 0.1, 0.0, 0.0, 1.0]
        whole = self.build()
        levels = self.rollouts(whole, rewards)
        assert levels == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0], "after two groups each: stay, up, stay, down, stay at 0"
        for end in (3, 5):
            first, second = self.build(), self.build()
            assert self.rollouts(first, rewards[:end]) == levels[:end]
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert self.rollouts(second, rewards[end:]) == levels[end:]
            assert second.state_dict() == whole.state_dict()

    def test_scores_of_another_level_do_not_move_it(self) -> None:
        source = self.build()
        source.begin_rollout(0, 0)
        (old,) = source.get_samples(1)
        self.rollouts(source, [1.0, 1.0])
        source.begin_rollout(2, 2)
        for sample in old:
            sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
        source.observe([old, old], True)
        assert self.rollouts(source, [0.5]) == [1]


class TestReward(RewardContract):
    component = "reasoning_gym"
    examples = [
        ("", f"It is <answer>{ANSWER}</answer>", None, 1.0),
        ("", f"{ANSWER}", None, 0.0),
        ("", "<answer>no</answer>", None, 0.0),
    ]

    @pytest.fixture(autouse=True)
    def _items(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite's samples become items of the task, which is all that the reward scores."""

        def item(*args: Any, **keywords: Any) -> Sample:
            sample = answered_sample(*args, **keywords)
            sample.metadata.update(ITEM)
            return sample

        monkeypatch.setattr("slime_testing_contracts.reward.answered_sample", item)


class TestEnvironment(EnvironmentContract):
    component = "reasoning_gym"
    metadata = ITEM
    actions = ("<answer>1</answer>", f"<answer>{ANSWER}</answer>")
    args = {"plugins": {"reasoning_gym": {"tries": 3}}}
    ends = True


class TestRecipe(RecipeContract):
    component = "reasoning_gym"
    args = {"plugins": {"reasoning_gym": {"eval_size": 4}}}

    @property
    def settings(self) -> SimpleNamespace:
        settings = super().settings
        settings.eval_prompt_data = ["heldout", f"{self.folder}/rg/heldout.jsonl"]
        return settings

    def test_its_rows_are_scored(self) -> None:
        self.resolved.obj(self.settings)
        lines = Path(self.settings.eval_prompt_data[1]).read_text(encoding="utf-8").splitlines()
        assert len(lines) == 4
        for row in map(json.loads, lines):
            sample = Sample(response=f"<answer>{row['label']}</answer>", metadata=row["metadata"])
            caller = RewardCaller(TestReward().resolved, self.settings)
            assert asyncio.run(caller.score([sample], False)) == [1.0]
