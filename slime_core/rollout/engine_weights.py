"""Load one weight version from its transport into an engine, in the engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args, RolloutEngine


async def deliver(
    args: Args, engine: RolloutEngine, transport: str, payload: Any, version: int
) -> Mapping[str, float] | None:
    """Load a version by the engine's own method for the transport, else by the transport's engine side.

    Returns metrics, if there are any.

    Args:
        args: The run's settings.
        engine: A started engine.
        transport: Spec of the transport: a name, `dist:name`, `file.py:attr`, ...
        payload: The object that the transport's `send` passed to `take`.
        version: Number of the version.

    Raises:
        WeightSyncError: The engine refused the weights.
    """
    name = transport.rpartition(":")[2]
    update = getattr(engine, f"update_weights_from_{name}", None)
    if update is None:
        update = partial(resolve("weight_transports", transport).obj.deliver, args, engine)
    measured: Mapping[str, float] | None = await update(payload, version)
    return measured
