"""The contract of rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from slime_core.plugins.adapters import RewardCaller
from slime_core.testing.contracts.base import Contract, answered_sample
from slime_core.types import Sample, SampleStatus


class RewardContract(Contract):
    """A finite number or a mapping for whatever comes, the same one every time, and nothing changed."""

    kind = "rewards"
    examples: ClassVar[Sequence[tuple[Any, str, Any, Any]]] = ()
    """(prompt, response, label, expected reward)"""
    deterministic: ClassVar[bool] = True

    def score(self, *samples: Sample) -> list[Any]:
        """One reward per sample, through the caller the pipeline uses."""
        caller = RewardCaller(self.resolved, self.settings)
        return asyncio.run(caller.score(list(samples)))

    def test_examples(self) -> None:
        """The author's examples hold."""
        for prompt, response, label, expected in self.examples:
            (found,) = self.score(answered_sample(prompt, response, label))
            assert found == pytest.approx(expected), f"prompt {prompt!r}, response {response!r}, label {label!r}"

    @pytest.mark.parametrize(
        ("response", "label", "status"),
        [
            ("", "2", SampleStatus.COMPLETED),
            ("2", None, SampleStatus.COMPLETED),
            ("", None, SampleStatus.COMPLETED),
            ("2", "", SampleStatus.COMPLETED),
            ("2", 2, SampleStatus.COMPLETED),
            ("the answer is", "2", SampleStatus.TRUNCATED),
            ("the ans", "2", SampleStatus.ABORTED),
            (r"\boxed{", "2", SampleStatus.TRUNCATED),
            (r"\boxed{}", "2", SampleStatus.COMPLETED),
            ("\u7b54\u6848\u662f 2 \U0001f389 \x00", "2", SampleStatus.COMPLETED),
            ("2 " * 50_000, "2", SampleStatus.TRUNCATED),
            ("(" * 5_000 + "{" * 5_000, "2", SampleStatus.COMPLETED),
        ],
        ids=[
            "empty-response", "no-label", "nothing-at-all", "empty-label", "number-label", "truncated", "aborted",
            "open-box", "empty-box", "unicode", "100k-characters", "unbalanced",
        ],
    )  # fmt: skip
    def test_odd_inputs_get_a_reward(self, response: str, label: Any, status: SampleStatus) -> None:
        """What a model writes is never a reason to raise."""
        (found,) = self.score(answered_sample("1+1=", response, label, status))
        assert _is_reward(found), f"expected a finite number or a mapping, got {found!r}"

    def test_chat_prompt(self) -> None:
        """Prompts may be chat messages."""
        sample = answered_sample()
        sample.prompt = [{"role": "user", "content": "1+1="}]
        assert _is_reward(self.score(sample)[0])

    def test_the_sample_is_left_alone(self) -> None:
        """The reward is returned; the pipeline stores it."""
        sample = answered_sample()
        before = sample.to_dict()
        self.score(sample)
        assert sample.to_dict() == before

    def test_same_input_same_reward(self) -> None:
        """Unless the class says `deterministic = False`."""
        if not self.deterministic:
            pytest.skip("declared deterministic = False")
        first, second = self.score(answered_sample()), self.score(answered_sample())
        assert first == second

    def test_many_at_once(self) -> None:
        """64 concurrent calls give what 64 calls in a row give."""
        if not self.deterministic:
            pytest.skip("declared deterministic = False")
        responses = [rf"so \boxed{{{i % 5}}}" for i in range(64)]
        samples = [answered_sample("?", response, "2") for response in responses]
        caller = RewardCaller(self.resolved, self.settings)

        async def together() -> list[Any]:
            return await asyncio.gather(*(caller.score([sample]) for sample in samples))

        in_turn = [self.score(sample) for sample in samples]
        assert asyncio.run(together()) == in_turn

    def test_a_batch_keeps_length_and_order(self) -> None:
        """Several samples in one call; also a batch of one."""
        samples = [answered_sample("?", rf"\boxed{{{i}}}", "2") for i in range(4)]
        together = self.score(*samples)
        assert len(together) == 4
        caller = RewardCaller(self.resolved, self.settings)
        if self.deterministic and not caller.scores_groups:
            assert together == [self.score(sample)[0] for sample in samples]
        assert len(self.score(samples[0])) == 1


def _is_reward(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, float) and math.isfinite(value))
