"""`slime.rollout.sleep_rollout.sleep`: a rollout that never ends, to keep the engines up for requests by hand.

    slime train ... --rollout-function-path slime.rollout.sleep_rollout.sleep

Standard error has the engine's address. Ctrl-C and SIGTERM end the run within a second; under Ray, where the rollout is
another process's, after `--drain-timeout`. `slime serve` keeps an engine up without a run.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

from slime import _missing
from slime_core.errors import RolloutInterrupted
from slime_core.launch import drain

logger = logging.getLogger(__name__)
_PERIOD = 60
"""Seconds between lines in the log."""


async def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Wait until the run is ended; the engine answers meanwhile."""
    from slime.rollout._state import router_url

    while True:
        logger.warning("rollout %s sleeps; the engine answers at %s", rollout_id, router_url(args))
        for _ in range(_PERIOD):
            await asyncio.sleep(1)
            asked = drain.current()
            if asked is not None and asked.asked:
                raise RolloutInterrupted(drew=False)


__all__ = ["sleep"]
__getattr__ = _missing.names(__name__)
