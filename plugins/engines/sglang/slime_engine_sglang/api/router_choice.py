"""Whether a try of a request goes through the router, or to a server directly.

`client` asks before every try, and tells of the ones that failed. Prefill and decode servers cannot be asked directly,
so their requests go through the router whatever it has done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from slime_core.errors import EngineError
from slime_engine_sglang.api.flights import Flight
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.worker import WorkerPool

logger = logging.getLogger(__name__)

ROUTER_REST_S = 2.0
"""A router that could not be reached is not asked for so long."""


class RouterChoice:
    """The router in front of the servers, if there is one, and whether it can be relied on.

    Args:
        router: In front of the servers.
        pool: The servers.
        counts: `bypassed_router` is counted in it.
        failed: Told when the router could not be reached.
    """

    def __init__(
        self, router: Router | None, pool: WorkerPool, counts: Counter[str], failed: Callable[[], object]
    ) -> None:
        self.router = router
        self.disaggregated = any(w.role in ("prefill", "decode") for w in pool.workers)
        self._counts = counts
        self._failed = failed
        self._rests_until = 0.0
        self._told: set[str] = set()

    def for_try(self, flight: Flight) -> Router | None:
        """The router, when this try goes through it. Raises EngineError when only the router could serve it."""
        router = self.router
        if router is None:
            return None
        dropped = router.dropped(flight.body)
        if self.disaggregated:
            if dropped and dropped != "sampling_params.sampling_seed":
                raise EngineError(
                    f"{dropped}: the router at {router.url} drops it, and prefill and decode servers"
                    " cannot be asked directly"
                )
            return router
        if dropped and dropped not in self._told:
            self._told.add(dropped)
            logger.info("requests with %s go to the servers directly: the router drops it", dropped)
        if dropped or flight.direct or time.monotonic() < self._rests_until:
            self._counts["bypassed_router"] += 1
            return None
        return router

    def blame(self, flight: Flight, error: EngineError) -> None:
        """Have the request avoid a router that failed it; one that could not be reached rests for everybody."""
        if self.router is None or error.url != f"{self.router.url}/generate":
            return
        flight.direct = True
        now = time.monotonic()
        if error.status is None and now >= self._rests_until:
            self._rests_until = now + ROUTER_REST_S
            self._failed()
