"""Servers that answer no request for tokens and without which others do not work: found when they fail, and restarted.

These are encoders and the further nodes of an engine; `supervisor` runs one watch for each. They hold no trained
weights of their own accord that could be wrong, so ready is all they have to be. What a reader would get wrong: nobody
is quarantined for them. A server whose companion is gone fails its requests or its own heartbeat, and comes back once
the companion has.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_engine_sglang.api.transport import Http
    from slime_engine_sglang.incidents import Incidents
    from slime_engine_sglang.recovery import Process

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0


class CompanionWatch:
    """`run` ends when it stays out; cancel it to stop."""

    def __init__(self, http: Http, process: Process, incidents: Incidents, max_restarts: int) -> None:
        self._http = http
        self._process = process
        self._incidents = incidents
        self._restarts_left = max_restarts

    async def run(self, interval: float | None, first_wait: float, timeout: float, tick: float) -> None:
        """Watch it.

        Args:
            interval: Seconds between two beats; None: only tell when it ends, and do not restart it.
            first_wait: Seconds from a start to the first beat.
            timeout: Seconds it has to answer.
            tick: Seconds between two looks at the process.
        """
        process, next_beat = self._process, time.monotonic() + max(first_wait, interval or 0.0)
        while True:
            reason = "" if process.alive else process.last_words()
            if not reason and interval is not None and time.monotonic() >= next_beat:
                reason = await self._beat(timeout)
                next_beat = time.monotonic() + interval
            if reason:
                self._incidents.tell("companion_failed", process.name, process.url, reason)
                if interval is None or not await self._restart():
                    return
                next_beat = time.monotonic() + max(first_wait, interval)
            await asyncio.sleep(tick)

    async def _beat(self, timeout: float) -> str:
        """What is wrong with it."""
        try:
            await self._http.send("GET", self._process.url, "/health", timeout=timeout)
        except EngineError as error:
            return f"{error}; asked for {timeout:g} s (--rollout-health-check-timeout)"
        return ""

    async def _restart(self) -> bool:
        process, began, delay = self._process, time.monotonic(), 0.0
        while self._restarts_left > 0:
            self._restarts_left -= 1
            await asyncio.sleep(delay)
            delay = min(max(2 * delay, _FIRST_DELAY_S), _LONGEST_DELAY_S)
            try:
                await process.restart()
            except EngineError as error:
                self._incidents.tell("restart_failed", process.name, process.url, str(error))
                continue
            self._incidents.tell("restarted", process.name, process.url, seconds=time.monotonic() - began)
            return True
        reason = "its restarts are used up (--rollout-max-engine-restarts)"
        self._incidents.tell("lost", process.name, process.url, reason)
        await asyncio.to_thread(process.kill)
        return False
