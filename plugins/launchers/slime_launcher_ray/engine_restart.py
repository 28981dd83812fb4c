"""Bring an engine's actor back into the run after it died and Ray restarted its process.

`engine_proxy` awaits `EngineRestart.again` in the rollout actor, then starts the new engine and sends it the served
weights. This needs `--use-fault-tolerance`: `Actors` then lets Ray restart the actor (`max_restarts`) in the same place
and under the same handle. Ray restarts the process whenever it dies; `--rollout-max-engine-restarts` limits how often
the actor is brought back into the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_runs.board import remove_board
from slime_runs.events import EventLog

from slime_core.errors import EngineError, SlimeError
from slime_core.protocols import Args
from slime_core.waits import gave_up, waiting
from slime_launcher_ray.fingerprint import Fingerprint, check_same_code
from slime_launcher_ray.wait import EngineGone, Member, awaited

logger = logging.getLogger(__name__)

_LOOK = 0.5


class EngineRestart:
    """The restarts of one engine's actor.

    Args:
        args: The run's settings.
        run_dir: Run directory, for the log of events.
        member: The actor.
        code: Fingerprint of this process; the restarted process must have the same.
        facts: Result of the actor's `open`; replaced at each restart.
        several_nodes: Whether processes on other nodes may call the engine over HTTP.
    """

    def __init__(
        self,
        args: Args,
        run_dir: Path,
        member: Member,
        code: Fingerprint,
        facts: Mapping[str, Any],
        *,
        several_nodes: bool,
    ) -> None:
        self._limit: int = args.rollout_max_engine_restarts
        self._patience: float = args.ray_placement_timeout
        self._run_dir = run_dir
        self._events = EventLog(run_dir)
        self._member = member
        self._code = code
        self.facts = facts
        self._several_nodes = several_nodes
        self._count = 0

    async def again(self, error: SlimeError) -> None:
        """Wait for Ray's new process and prepare its log, settings and code, so that the engine can start.

        Args:
            error: The error that ended the old process.

        Raises:
            EngineError: There are too many restarts, or Ray did not start a new process in time.
        """
        first = str(error).splitlines()[0].rstrip(":;")
        if self._count >= self._limit:
            raise EngineError(
                f"{error}\n(given up after {self._count} restart{'s' * (self._count != 1)} of the engine:"
                f" --rollout-max-engine-restarts {self._limit})"
            )
        self._count += 1
        logger.warning("%s; restart %d of %d, with the weights that were served", first, self._count, self._limit)
        self._events.write("engine_restart", reason=first, number=self._count)
        remove_board(self._run_dir, self.facts["host"], self.facts["pid"])
        what = f"a place for {self._member.name}, whose node may be gone"
        try:
            with waiting(what, deadline=self._patience, then="the run stops"):
                async with asyncio.timeout(self._patience):
                    self.facts = await self._opened()
        except TimeoutError:
            note = gave_up(what, self._patience, "the run stops")
            raise EngineError(f"{error}\n(Ray has not started it again: --ray-placement-timeout, {note})") from None
        if self._several_nodes:
            await self._ask("set_environment", {"SLIME_HOST_IP": self.facts["ip"]})
        theirs = await self._ask("prepare")
        check_same_code(self._code, [(self._member.name, self.facts["host"], theirs)])

    async def _opened(self) -> Mapping[str, Any]:
        while True:
            try:
                facts: Mapping[str, Any] = await self._ask("open", True)
                return facts
            except EngineGone:  # also raised while Ray is starting the process
                await asyncio.sleep(_LOOK)

    async def _ask(self, method: str, *args: Any) -> Any:
        return await awaited(self._member, self._member.submit(method, *args), method)
