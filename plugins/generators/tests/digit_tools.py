"""An environment with a tool, for the tests."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitTools"]


class Doubler(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def double(self, number: int) -> int:
        """Twice a number."""
        return 2 * number


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def doubled(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == "42")

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Doubler(vf.ToolsetConfig())]


class DigitTools(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ToolTask]:
        yield ToolTask(vf.TaskData(prompt="Double 21."), self.config.task)


if __name__ == "__main__":
    Doubler.run()
