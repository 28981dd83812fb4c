"""Watches one router that we launched: restarts it on its port, and keeps its list of workers that of the pool.

A task of the supervisor. While it is away requests go to the servers directly, so nothing waits for it. What a reader
would get wrong: a restarted router knows nobody, and one that was down missed who came and went, so the list is
compared at every beat instead of being kept by counting.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_engine_sglang.api.router import Router
    from slime_engine_sglang.incidents import Incidents
    from slime_engine_sglang.recovery import RouterLike, Supervised

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0


class RouterWatch:
    """`run` ends when the router stays out; cancel it to stop."""

    def __init__(
        self, model: Supervised, router: Router, process: RouterLike, incidents: Incidents, max_restarts: int
    ) -> None:
        self._model = model
        self._router = router
        self._process = process
        self._incidents = incidents
        self._restarts_left = max_restarts
        self._name = process.name

    async def run(self, interval: float | None, timeout: float, wake: asyncio.Event, tick: float) -> None:
        """Watch it.

        Args:
            interval: Seconds between two beats; None: only tell when it ends, and do not restart it.
            timeout: Seconds it has to answer.
            wake: Set when somebody could not reach it.
            tick: Seconds between two looks at the process.
        """
        next_beat = time.monotonic() + (interval or 0.0)
        while True:
            reason = "" if self._process.alive else self._process.last_words()
            if not reason and interval is not None and (wake.is_set() or time.monotonic() >= next_beat):
                wake.clear()
                reason = await self._beat(timeout)
                next_beat = time.monotonic() + interval
            if reason:
                self._incidents.tell("router_failed", self._name, self._router.url, reason)
                if interval is None or not await self._restart():
                    return
            try:
                async with asyncio.timeout(tick):
                    await wake.wait()
            except TimeoutError:
                continue

    async def _beat(self, timeout: float) -> str:
        """What is wrong with it; makes its workers the pool's when nothing is."""
        try:
            async with asyncio.timeout(timeout):
                listed = await self._router.list_workers()
        except TimeoutError:
            return f"no answer within {timeout:g} s (--rollout-health-check-timeout)"
        except EngineError as error:
            return str(error)
        await self._correct(set(listed or ()))
        return ""

    async def _correct(self, listed: set[str]) -> None:
        ready = {worker.url: worker for worker in self._model.pool.ready}
        try:
            for url in listed - ready.keys():
                await self._router.remove_worker(url)
            for url in ready.keys() - listed:
                await self._router.add_worker(ready[url])
        except EngineError as error:  # the next beat tries again; until then that server is asked directly
            self._incidents.tell("router_refused", self._name, self._router.url, str(error))

    async def _restart(self) -> bool:
        began, delay = time.monotonic(), 0.0
        while self._restarts_left > 0:
            self._restarts_left -= 1
            await asyncio.sleep(delay)
            delay = min(max(2 * delay, _FIRST_DELAY_S), _LONGEST_DELAY_S)
            try:
                self._process.start_with([worker.url for worker in self._model.pool.ready])
                await self._process.restart()
            except EngineError as error:
                self._incidents.tell("router_restart_failed", self._name, self._router.url, str(error))
                continue
            await self._correct(set())
            seconds = time.monotonic() - began
            self._incidents.tell("router_restarted", self._name, self._router.url, seconds=seconds)
            return True
        reason = "its restarts are used up (--rollout-max-engine-restarts); requests go to the servers directly"
        self._incidents.tell("router_lost", self._name, self._router.url, reason)
        return False
