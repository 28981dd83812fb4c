"""A directory of weights in HF layout -> servers that load it: `/update_weights_from_disk`.

The directory must be visible under the same path where the servers run. SGLang and our embedded server both take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_engine_sglang.api.weight_protocol import ServerFacts, load
from slime_engine_sglang.api.weight_round import Round
from slime_engine_sglang.api.worker import Worker


async def push_directory(round_: Round, path: Path) -> None:
    """Every live server loads `path`. Raises WeightSyncError as `Round.each`."""

    async def take(worker: Worker) -> None:
        facts = round_.facts[worker]
        body = directory_body(path, facts, str(round_.version))
        await load(round_.http, worker.url, "/update_weights_from_disk", body, facts, timeout=round_.timeout)

    await round_.each(f"loading {path}", take)


def directory_body(path: Path, facts: ServerFacts, version: str) -> dict[str, Any]:
    """The request; SGLang's cache is flushed later (`weight_protocol.flush_cache` says why)."""
    body: dict[str, Any] = {"model_path": str(path.absolute()), "weight_version": version}
    return body | {"flush_cache": False} if facts.is_sglang else body
