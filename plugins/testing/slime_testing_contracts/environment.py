"""The contract of environments, which are called like in generators, through `EnvironmentSession`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from slime_environments.session.session import EnvironmentSession

from slime_core.errors import PluginError
from slime_core.protocols.environment import Step, Turn
from slime_core.sample import Sample
from slime_testing_contracts.base import Contract

NONSENSE = ("", " ", "\x00\ufffd", "[" * 500, "<tool>{]</tool>")
"""Invalid texts that a policy may write instead of an action."""


class EnvironmentContract(Contract):
    """Contract of environments: typed results, replies to invalid actions, equal siblings, and restored sessions."""

    kind = "environments"
    prompt: ClassVar[Any] = "Begin."
    """Prompt of the row: text or chat messages."""
    label: ClassVar[Any] = None
    metadata: ClassVar[Mapping[str, Any]] = {}
    """Metadata of the row."""
    actions: ClassVar[Sequence[str]] = ("1", "2")
    """Actions of the policy, in order; an episode that ends earlier does not use the rest."""
    ends: ClassVar[bool] = False
    """True if the episode is over after `actions`."""

    def sample(self, index: int = 0) -> Sample:
        """Return a row as the data source makes it."""
        return Sample(
            group_index=7, index=index, prompt=self.prompt, label=self.label, tokens=[1, 2],
            metadata=json.loads(json.dumps(dict(self.metadata))),
        )  # fmt: skip

    def play(self, actions: Sequence[str], index: int = 0) -> tuple[Any, list[Step]]:
        """Play an episode and return its first observation and its steps."""

        async def run() -> tuple[Any, list[Step]]:
            sample = self.sample(index)
            session = await self.open(sample)
            try:
                first = await session.reset(sample)
                steps = await self._steps(session, actions)
            finally:
                problem = await session.close()
            assert problem is None, problem
            return first, steps

        played: tuple[Any, list[Step]] = self._run(run())
        return played

    async def open(self, sample: Sample) -> EnvironmentSession:
        """Open a session as a generator does."""
        settings = self.settings
        settings.environment_path = self.component
        return await EnvironmentSession.open(settings, sample)

    def test_an_episode_is_played(self) -> None:
        """Check that reset and step return the declared types, and that `ends` is correct."""
        _, steps = self.play(self.actions)
        assert all(math.isfinite(step.reward) for step in steps), f"rewards {[step.reward for step in steps]}"
        if self.ends:
            assert steps[-1].done, f"after {len(steps)} actions the episode is not done"
        for step in steps:
            assert step.done or step.observation, (
                "a step that is not done shows something, for the policy to go on from"
            )

    def test_nonsense_is_answered(self) -> None:
        """Check that the environment accepts any text as an action and replies instead of raising."""
        for text in NONSENSE:
            try:
                self.play([text])
            except PluginError as error:
                pytest.fail(f"the action {text[:20]!r}: {error}", pytrace=False)

    def test_samples_of_a_group_see_the_same(self) -> None:
        """Check that samples of a group have the same task, since their rewards are compared."""
        one, other = self.play([], index=0)[0], self.play([], index=1)[0]
        assert one == other, f"two samples of a group saw {one!r} and {other!r}; draw from sample.group_index"

    def test_the_same_actions_lead_to_the_same(self) -> None:
        """Check that row and actions determine the episode."""
        assert self.play(self.actions) == self.play(self.actions), "the same actions led to other answers"

    def test_it_may_be_closed_at_any_time(self) -> None:
        """Check that closing works before and after reset."""

        async def run(reset: bool) -> str | None:
            sample = self.sample()
            session = await self.open(sample)
            if reset:
                await session.reset(sample)
            return await session.close()

        for reset in (False, True):
            problem = self._run(run(reset))
            assert problem is None, f"closed {'after' if reset else 'before'} reset: {problem}"

    def test_a_restored_one_goes_on(self) -> None:
        """Check that another instance, restored from a snapshot, continues like the first instance."""
        if not all(callable(getattr(self.resolved.obj, name, None)) for name in ("snapshot", "restore")):
            pytest.skip("it has no snapshot and restore: interrupted samples start again")
        _, expected = self.play(self.actions)
        for done in range(len(expected)):
            if not expected[done].done:
                found = self._run(self._interrupted(done + 1))
                assert found == expected[done + 1 :], f"restored after {done + 1} steps, it answered otherwise"

    async def _interrupted(self, after: int) -> list[Step]:
        sample = self.sample()
        first = await self.open(sample)
        await first.reset(sample)
        await self._steps(first, self.actions[:after])
        state = json.loads(json.dumps(await first.snapshot()))
        await first.close()
        second = await self.open(sample)
        try:
            await second.restore(sample, state, after)
            return await self._steps(second, self.actions[after:], after)
        finally:
            await second.close()

    async def _steps(self, session: EnvironmentSession, actions: Sequence[str], first: int = 0) -> list[Step]:
        steps: list[Step] = []
        for number, action in enumerate(actions, first):
            steps.append(await session.step(action, Turn(number, action, [ord(c) for c in action], "stop")))
            if steps[-1].done:
                break
        return steps

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)
