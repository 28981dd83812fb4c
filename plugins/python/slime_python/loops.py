"""The loop's side of a channel: hook plugins that pause the built-in loop, or run the calls of a Trainer instead.

They live in the process that leads the run, which is the caller's own one, or one that it has started::

    Trainer            calls  -->  ("rollout", None) ("update", batch) ("next", None) ("commit", None) ...
                              <--  the answer of each call, or a Step
    Following          `train()`: the built-in loop; it can be asked to end
    Stepping           `for step in trainer`: the built-in loop, which waits after each step
    Calls              `rollout`, `update`, `sync`: the stages do what the caller asks
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pluggy

from slime_core import hookimpl
from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.errors import RolloutInterrupted
from slime_core.launch.drive import RunParts
from slime_core.loop import Stages, answer, saves_after, train
from slime_core.plugins.registry import Resolved
from slime_core.protocols import Args
from slime_core.sample import Group
from slime_core.waits import first_results, waiting
from slime_python.changes import change
from slime_python.channel import VARIABLE, Channel, connected
from slime_python.steps import Batch, Step


class Following:
    """The built-in loop, which ends early on request. Also the observer that registers itself as a hook plugin."""

    def __init__(self, channel: Channel | None = None) -> None:
        self._given = channel
        self._ending = False
        self._interrupt: Callable[[], None] = lambda: None

    def interrupt(self) -> None:
        """End the running rollout, and the run with a commit. Any thread may call it."""
        self._ending = True
        self._interrupt()

    def forget(self) -> None:
        """Forget the parts of the run that has ended, which hold its model."""
        self._interrupt = lambda: None
        vars(self).pop("_parts", None)
        vars(self).pop("_stages", None)

    def resolved(self, found: Resolved) -> None:
        """Ignore the component; only `built` is needed."""

    def built(self, manager: pluggy.PluginManager) -> None:
        """Register this object as a hook plugin of the run."""
        if not manager.is_registered(self):
            manager.register(self, name=f"slime_python:{type(self).__name__}")

    @hookimpl
    def slime_loop(self, parts: RunParts) -> Callable[..., Any]:
        """Return the loop to run."""
        self._parts = parts
        self._interrupt = parts.stage.interrupt

        async def run(args: Args, stages: Stages, start: int) -> int:
            if self._ending:
                return start
            self._args = args
            self._stages = replace(stages, stop=lambda: self._ending or stages.stop())
            return await self._loop(start)

        return run

    async def _loop(self, start: int) -> int:
        return await train(self._args, self._stages, start)


class _Answering(Following):
    """A loop that talks to the caller."""

    def __init__(self, channel: Channel | None = None) -> None:
        super().__init__(channel)
        self._groups: dict[int, list[Group]] = {}

    @hookimpl
    def slime_rollout_end(self, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Keep the groups for the caller."""
        self._groups[rollout_id] = groups

    def _channel(self) -> Channel:
        """Return the channel; a process that a Trainer started connects first."""
        if self._given is None:
            self._given = connected(os.environ[VARIABLE].partition(":")[2])
        return self._given

    async def _next_call(self) -> tuple[str, Any]:
        """Wait for the caller. With `--async` the event loop turns meanwhile, for what is generated ahead."""
        first_results()  # else the console says every half minute that the run is still starting
        with waiting("the caller of the Trainer", deadline=None, then="as long as it takes"):
            try:
                receive = self._channel().recv
                found: tuple[str, Any] = await asyncio.to_thread(receive) if self._args.async_training else receive()
            except EOFError:  # the caller's process is gone
                return "end", None
        return found

    async def _commit(self, rollout_id: int) -> None:
        await answer(self._stages.rollout.before_save())
        await answer(self._stages.journal.save(rollout_id))


class Stepping(_Answering):
    """The built-in loop, which waits for the caller after each step."""

    async def _loop(self, start: int) -> int:
        stages = replace(self._stages, journal=_Paused(self._stages.journal, self._pause))
        return await train(self._args, stages, start)

    async def _pause(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        groups = self._groups.pop(rollout_id, [])
        self._channel().send(Step(rollout_id + 1, dict(metrics), groups, Path(run_dir_of(self._args))))
        while not self._ending:
            verb, value = await self._next_call()
            if verb == "commit":
                await self._commit(rollout_id)
                self._channel().send(None)
            elif verb == "change":
                self._channel().send(change(self._args, self._parts, value))
            elif verb == "end":
                self._ending = True
            else:
                return


class _Paused:
    """The journal of a loop that waits after each step."""

    def __init__(self, journal: Any, pause: Callable[[int, Mapping[str, float]], Awaitable[None]]) -> None:
        self._journal, self._pause = journal, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def step_end(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Record the step, then wait for the caller."""
        await answer(self._journal.step_end(rollout_id, metrics))
        await self._pause(rollout_id, metrics)


class Calls(_Answering):
    """The stages, which do what the caller asks; a step is recorded when the next one begins, and at the end."""

    async def _loop(self, start: int) -> int:
        self._done, self._saved = start, start - 1
        self._metrics: dict[str, float] | None = None
        """Metrics of the rollout that is trained on and not yet recorded."""
        self._drawn: dict[str, float] = {}
        verbs: dict[str, Callable[[Any], Awaitable[Any]]]
        verbs = {"rollout": self._rollout, "update": self._update, "sync": self._sync}
        verbs |= {"commit": self._commit_done, "change": self._change}
        await answer(self._stages.weights.push())
        drew = False
        while not self._ending:
            verb, value = await self._next_call()
            if verb == "end":
                break
            try:
                self._channel().send(await verbs[verb](value))
            except RolloutInterrupted as interrupted:
                drew = interrupted.drew
                break
        await self._finish()
        if self._done and (drew or self._saved != self._done - 1):
            await self._commit(self._done - 1)
        return self._done

    async def _rollout(self, value: None) -> Batch:
        await self._finish()
        number = self._done
        found = await answer(self._stages.rollout.generate(number))
        self._drawn = dict(found.metrics)
        return Batch(number + 1, dict(found.metrics), self._groups.pop(number, []), found.batch)

    async def _update(self, value: Any) -> dict[str, float]:
        found: dict[str, float] = await answer(self._stages.learner.train(self._done, value))
        self._metrics = {**(self._metrics or self._drawn), **found}
        return found

    async def _sync(self, value: None) -> dict[str, float]:
        await answer(self._stages.rollout.before_push())
        found: dict[str, float] = await answer(self._stages.weights.push())
        if self._metrics is not None:
            self._metrics |= found
        return found

    async def _change(self, value: Mapping[str, Any]) -> bool:
        return change(self._args, self._parts, value)

    async def _commit_done(self, value: None) -> None:
        """Commit the last rollout that was trained on."""
        await self._finish()
        if self._done and self._saved != self._done - 1:
            await self._commit(self._done - 1)
            self._saved = self._done - 1

    async def _finish(self) -> None:
        """Record the rollout that was trained on, and commit it where the settings say so."""
        if self._metrics is None:
            return
        metrics, self._metrics = self._metrics, None
        rollout_id, self._done = self._done, self._done + 1
        await answer(self._stages.journal.step_end(rollout_id, metrics))
        if saves_after(self._args, rollout_id):
            await self._commit(rollout_id)
            self._saved = rollout_id


MODES: Mapping[str, type[Following]] = {"train": Following, "steps": Stepping, "calls": Calls}
"""Mode of a Trainer -> the hook plugin that runs the loop."""
