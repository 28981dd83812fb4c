"""An environment of two seats that train and one that does not, for the tests."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitSeats", "ThreeSeats"]


class SeatTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def seven(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == "7")


class DigitSeats(vf.Taskset[SeatTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SeatTask]:
        yield SeatTask(vf.TaskData(prompt="Write a digit."), self.config.task)


class SeatsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    user: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class ThreeSeats(vf.Env[SeatsConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.user.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for agent in (agents.first, agents.user, agents.second):
            await agent.run(task)
