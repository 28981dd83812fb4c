"""Weight deltas -> servers, by pullers on the same hosts: one `slime pull-weights` per host updates its local copy of
the model to the version and makes its servers load it.

`HttpEngine` and the engine that launches servers call `update_by_deltas`. A puller serves several servers, and only the
servers that it reports as failed are quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from slime_core.errors import EngineError
from slime_engine_http.api.transport import Http, refusal
from slime_engine_http.api.worker import Worker
from slime_engine_http.weights.protocol import WeightsRefused
from slime_engine_http.weights.round import Round
from slime_engine_http.weights.update import Kept, WeightUpdates

_ASK_S = 30.0


async def update_by_deltas(
    updates: WeightUpdates, pullers: Sequence[str], version: int, *, timeout: float
) -> dict[str, float]:
    """Update every ready server to `version`; return metrics of the update.

    Args:
        updates: Weight updates of the engine's pool.
        pullers: URLs of the pullers.
        version: Version that has been written to the pullers' directory.
        timeout: Seconds for a puller and its servers.

    Raises:
        WeightSyncError: A server failed without `--use-fault-tolerance`, or all servers failed and none is slime's own.
    """
    return await updates.run(Kept(version, "delta", partial(push_deltas, pullers=pullers, timeout=timeout)))


async def push_deltas(round_: Round, pullers: Sequence[str], timeout: float) -> None:
    """Make every live server load the version. Raises WeightSyncError like `Round.each`."""
    homes = await _homes(round_.http, [worker.url for worker in round_.live], pullers)
    by_puller: dict[str, list[Worker]] = {}
    for worker in round_.live:
        if isinstance(home := homes[worker.url], str):
            by_puller.setdefault(home, []).append(worker)
    asked = {
        puller: asyncio.create_task(_pull(round_, puller, workers, timeout)) for puller, workers in by_puller.items()
    }

    async def outcome(worker: Worker) -> None:
        home = homes[worker.url]
        if isinstance(home, EngineError):
            raise home
        answer = await asyncio.shield(asked[home])
        _check(answer, worker.url, home)

    try:
        await round_.each("pulling the delta", outcome)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def _pull(round_: Round, puller: str, workers: Sequence[Worker], timeout: float) -> dict[str, Any]:
    """Return the puller's response, which may report failures. Raises EngineError if it does not respond."""
    urls = [worker.url for worker in workers]
    # SGLang cannot flush while requests are paused, and its server would end; the round flushes later.
    flush = all(round_.facts[worker].is_atomic for worker in workers)
    body = {"version": round_.version, "engine_urls": urls, "timeout": timeout, "flush_cache": flush}
    # Pulling the same version twice is harmless. The puller's own deadline is earlier and its error is more exact.
    answer = await round_.http.send("POST", puller, "/pull", body, timeout=timeout + 10.0, accept=(400, 409))
    if answer.status == 400:
        raise EngineError(f"puller {puller}: {refusal(answer.status, answer.body)}")
    return answer.object()


def _check(answer: dict[str, Any], url: str, puller: str) -> None:
    """Raise EngineError or WeightsRefused unless the puller reports that the server has loaded the version."""
    outcome = answer.get("engines", {}).get(url)
    if outcome is None:
        problem = answer.get("message") or "it says nothing of this engine"
        raise WeightsRefused(f"puller {puller}: {problem}", untouched=True)  # no request reached the engine
    if outcome.get("success") is not True:
        problem = f"puller {puller}: {outcome.get('message')}"
        raise WeightsRefused(problem, untouched=False) if outcome.get("refused") else EngineError(problem)


async def _homes(http: Http, urls: Sequence[str], pullers: Sequence[str]) -> dict[str, str | EngineError]:
    """Map each server to the puller that names it, else to a puller that takes any server, else to an error."""

    async def engines_of(puller: str) -> list[str] | EngineError:
        try:
            status = (await http.send("GET", puller, "/status", timeout=_ASK_S)).object()
        except EngineError as error:
            return EngineError(f"puller {puller}: {error}")
        return list(status.get("engine_urls", []))

    answers = dict(zip(pullers, await asyncio.gather(*map(engines_of, pullers))))
    silent = next((answer for answer in answers.values() if isinstance(answer, EngineError)), None)
    known = {puller: urls for puller, urls in answers.items() if not isinstance(urls, EngineError)}
    homes: dict[str, str | EngineError] = {}
    for url in urls:
        named = [puller for puller, theirs in known.items() if url in theirs]
        takes_any = [puller for puller, theirs in known.items() if not theirs]
        found = (named or takes_any)[:1]
        serve = "; ".join(f"{puller} serves {', '.join(theirs)}" for puller, theirs in known.items())
        homes[url] = found[0] if found else silent or EngineError(f"{url}: no puller loads this engine ({serve})")
    return homes
