"""An environment of verifiers: write digits in two turns, the second after seeing the first.

It does not depend on slime; `vf-eval digit-echo` runs it against any endpoint. `DigitEcho` has the tasks, `TwoTurns`
runs a task, and the task's own methods score it.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitEcho", "TwoTurns"]


class DigitConfig(vf.TasksetConfig):
    """Settings under `env.taskset`."""

    number: int = 48
    """Number of tasks."""


class DigitTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A task to write digits; every answer counts."""

    @vf.reward
    async def share_of_digits(self, trace: vf.Trace) -> float:
        """Return the share of digits among the characters of all answers, in [0, 1]."""
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter.isdigit() for letter in said) / len(said) if said else 0.0

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        """Return the number of answers."""
        return float(len(trace.assistant_messages))


class DigitEcho(vf.Taskset[DigitTask, DigitConfig]):
    """A task set with the same numbered request."""

    def load(self) -> Iterator[DigitTask]:
        """Return all tasks."""
        for number in range(self.config.number):
            yield DigitTask(vf.TaskData(prompt=f"Write digits, task {number}."), self.config.task)


class TwoTurns(vf.Env[vf.SingleAgentEnvConfig]):
    """An environment with one seat that takes two turns."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Get the opening answer, and an answer to "again"."""
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("again")
