"""An environment whose reward raises, for the tests."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitTrouble"]


class TroubleTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise KeyError("a reward that raises")


class DigitTrouble(vf.Taskset[TroubleTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TroubleTask]:
        for number in range(4):
            yield TroubleTask(vf.TaskData(prompt=f"Write {number}."), self.config.task)
