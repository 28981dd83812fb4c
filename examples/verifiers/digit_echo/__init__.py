"""An environment of verifiers: say digits in two turns, the second one after seeing the first.

Nothing in it knows of slime; `vf-eval digit-echo` plays it against any endpoint. `DigitEcho` has the tasks, `TwoTurns`
is how one is played, and the task's own methods score it.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitEcho", "TwoTurns"]


class DigitConfig(vf.TasksetConfig):
    """What may be set under `env.taskset`."""

    number: int = 48
    """Tasks."""


class DigitTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Write digits; every answer counts."""

    @vf.reward
    async def share_of_digits(self, trace: vf.Trace) -> float:
        """Of the characters of all answers, in [0, 1]."""
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter.isdigit() for letter in said) / len(said) if said else 0.0

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        """How many there were."""
        return float(len(trace.assistant_messages))


class DigitEcho(vf.Taskset[DigitTask, DigitConfig]):
    """The same request, numbered."""

    def load(self) -> Iterator[DigitTask]:
        """All tasks."""
        for number in range(self.config.number):
            yield DigitTask(vf.TaskData(prompt=f"Write digits, task {number}."), self.config.task)


class TwoTurns(vf.Env[vf.SingleAgentEnvConfig]):
    """One seat, asked twice."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """The opening answer, and one to "again"."""
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("again")
