"""Calls that go to every ready server at once: abort, pause, flush, information. Routers do not forward them.

`HttpEngine` inherits them. If a call must reach all servers (pause, resume, memory) and a server fails, the server is
taken out of the pool, because its state now differs from the others. The call then succeeds if the server will be
brought back, and raises otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tenacity

from slime_core.errors import EngineError
from slime_engine_http.api.transport import (
    MODEL_INFO,
    RETRY_STATUS,
    SERVER_INFO,
    Answer,
    Http,
    engine_error,
    expecting,
)
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
FLUSH_TIMEOUT_S = 60.0
PAUSE_MODES = ("abort", "in_place", "retract")
_FLUSH_POLL_S = 0.1
_LOADS = "/v1/loads"


class Control:
    """Control calls for the servers of a pool: all work of `HttpEngine` except generation and weight updates."""

    def __init__(self, http: Http, pool: WorkerPool) -> None:
        self.http, self.pool = http, pool
        self._held: set[str] = set()
        """Reasons why the servers do not generate now."""
        self._offloaded: Sequence[Worker] | None = None
        """Servers whose memory is released and resumed; None: every ready server."""

    async def everywhere(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        repeat: bool = True,
        timeout: float = CONTROL_TIMEOUT_S,
        must_reach_all: bool = False,
        workers: Sequence[Worker] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Call every ready worker; return a mapping from URL to JSON answer ({} if it is not a JSON object).

        Args:
            method: "GET" or "POST".
            path: Path of the endpoint.
            body: JSON object.
            repeat: False if a second execution would do harm.
            timeout: Seconds for each worker.
            must_reach_all: Quarantine a worker that stops answering.
            workers: Call only the ready workers among these.

        Raises:
            EngineError: A worker failed; the message names every failed worker.
        """

        async def send(worker: Worker) -> Answer:
            return await self.http.send(method, worker.url, path, body, timeout=timeout, repeat=repeat)

        workers = [w for w in self.pool.ready if workers is None or w in workers]
        answers = await asyncio.gather(*map(send, workers), return_exceptions=True)
        self._raise(workers, answers, take_out=must_reach_all)
        return {w.url: a.object() for w, a in zip(workers, answers) if isinstance(a, Answer)}

    def _raise(self, workers: Sequence[Worker], results: Sequence[object], *, take_out: bool = False) -> None:
        """Raise one EngineError for all failed workers, except workers that were taken out and will be brought back."""
        failed: list[EngineError] = []
        for worker, result in zip(workers, results):
            if isinstance(result, EngineError):
                refused = result.status is not None and result.status not in RETRY_STATUS
                if take_out and not refused:  # a refusal concerns the call, not the server
                    self.pool.set_state(worker, WorkerState.QUARANTINED, str(result))
                    if worker.awaited:
                        continue
                failed.append(result)
            elif isinstance(result, BaseException):
                raise result
        if not failed and (self.pool.ready or self.pool.recovering):
            return
        if len(failed) == 1:
            raise failed[0]
        raise EngineError("; ".join(map(str, failed)) or self._nobody())

    def _nobody(self) -> str:
        return f"no engine is ready: {self.pool.describe()}"

    # -- requests --------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None) -> None:
        """Abort a request, or all, on every worker. A worker that accepts no connections is taken out of the pool."""
        body: dict[str, Any] = {"abort_all": True} if rid is None else {"rid": rid}

        async def send(worker: Worker) -> Answer | None:
            try:
                return await self.http.send("POST", worker.url, "/abort_request", body, timeout=CONTROL_TIMEOUT_S)
            except EngineError as error:
                if error.reached:
                    raise
                if worker.awaited or any(w is not worker for w in self.pool.ready):
                    self.pool.set_state(worker, WorkerState.QUARANTINED, str(error))
                return None

        workers = self.pool.ready
        results = await asyncio.gather(*map(send, workers), return_exceptions=True)
        if any(isinstance(result, BaseException) for result in results):
            self._raise(workers, results, take_out=self.pool.recovering)

    async def pause(self, mode: str = "in_place") -> None:
        """Stop generation: "abort" ends running requests, "in_place" holds them, "retract" also frees their memory.

        Raises:
            EngineError: A worker failed, or its version does not support the mode.
        """
        if mode not in PAUSE_MODES:
            raise EngineError(f"pause mode {mode!r}; allowed: {', '.join(PAUSE_MODES)}")
        self._hold("paused")
        try:
            await self.everywhere("POST", "/pause_generation", {"mode": mode}, must_reach_all=True)
            self.pool.pause_mode = mode
        except EngineError as error:
            if error.status is not None and error.status not in RETRY_STATUS:
                problem = f"it does not take pause mode {mode!r}: {error}"
                raise engine_error(error.url or "", problem, error.status) from error
            raise

    async def resume(self) -> None:
        """Continue generation after `pause`."""
        await self.everywhere("POST", "/continue_generation", {}, must_reach_all=True)
        self.pool.pause_mode = None
        self._release("paused")

    async def flush_cache(self, timeout: float | None = None) -> None:
        """Drop cached prefixes on every worker; repeat the call while SGLang refuses because requests are running."""
        workers = self.pool.ready
        calls = (flush(self.http, worker.url, timeout=timeout) for worker in workers)
        self._raise(workers, await asyncio.gather(*calls, return_exceptions=True))

    # -- memory ----------------------------------------------------------------------------------------

    async def can_release(self) -> list[Worker]:
        """Return the ready workers whose memory SGLang can free: all except those without its memory saver.

        A worker without the memory saver answers as if it had released its memory, and SGLang 0.5.20 dies of a
        KeyError when it resumes memory that it has not released.
        """
        workers = self.pool.ready
        told = await self.asked(workers, SERVER_INFO)
        return [w for w, info in zip(workers, told) if info.get("enable_memory_saver") is not False]

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Release memory ("kv_cache", "weights", "cuda_graph"; None: all); no generation until `resume_memory`.

        Servers must be idle.
        """
        self._hold("released")
        body = {} if tags is None else {"tags": list(tags)}
        await self.everywhere(
            "POST", "/release_memory_occupation", body, repeat=False, must_reach_all=True, workers=self._offloaded
        )

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Allocate released memory again; servers generate after a call for all tags (None) or for "kv_cache"."""
        body = {} if tags is None else {"tags": list(tags)}
        await self.everywhere(
            "POST", "/resume_memory_occupation", body, repeat=False, must_reach_all=True, workers=self._offloaded
        )
        if tags is None or "kv_cache" in tags:
            self._release("released")

    def _hold(self, why: str) -> None:
        self._held.add(why)
        self.pool.paused = True

    def _release(self, why: str) -> None:
        self._held.discard(why)
        self.pool.paused = bool(self._held)

    # -- information -----------------------------------------------------------------------------------

    async def info(self) -> dict[str, Any]:
        """Return the first ready worker's information, with the load summed over all ready workers."""
        workers = self.pool.ready
        if not workers:
            raise EngineError(self._nobody())
        servers = await self.asked(workers, SERVER_INFO)
        models = await self.asked(workers, MODEL_INFO)
        if not servers or not models:
            raise EngineError(self._nobody())
        loads = servers if "num_running" in servers[0] else await self.asked(workers, _LOADS)
        ranks = [rank for answer in loads for rank in _ranks(answer)]
        load = {key: sum(rank[key] for rank in ranks) for key in ("num_running", "num_waiting")}
        first = servers[0]
        context = first.get("max_context_length") or first.get("context_length") or first.get("max_req_input_len")
        addresses = [worker.url for worker in self.pool.workers]
        return {**first, **models[0], **load, "max_context_length": context, "addresses": addresses}

    async def healthy(self) -> None:
        """Check that every ready worker generates; resume a paused worker. Raises EngineError."""
        workers = self.pool.ready
        self._raise(workers, await asyncio.gather(*map(self._healthy, workers), return_exceptions=True))

    async def _healthy(self, worker: Worker) -> None:
        timeout = CONTROL_TIMEOUT_S
        answer = await self.http.send("GET", worker.url, "/health", timeout=timeout, accept=(503,))
        if answer.status != 503:
            return
        await self.http.send("POST", worker.url, "/continue_generation", {}, timeout=timeout, accept=(404,))
        await self.http.send("GET", worker.url, "/health", timeout=timeout)
        logger.warning(
            "engine %s did not generate until it was told to go on: a run that ended may have left it paused in the"
            " middle of a weight update, and until the next one its weights may be a mixture",
            worker.url,
        )

    async def asked(self, workers: Sequence[Worker], path: str) -> list[dict[str, Any]]:
        """Return the answer of each ready worker to a GET request. Raises EngineError."""
        return list((await self.everywhere("GET", path, workers=workers)).values())

    async def check_versions(self) -> None:
        """Quarantine the ready workers whose weight version differs from the wanted version."""
        for worker in self.pool.ready:
            wanted = self.pool.version_wanted
            try:
                told = await self.everywhere("GET", MODEL_INFO, workers=[worker])
            except EngineError:  # the next request to this worker handles the error
                continue
            if wanted is None or wanted != self.pool.version_wanted or self.pool.version_coming is not None:
                return
            # A worker that was taken out during the calls has no answer.
            version = told.get(worker.url, {}).get("weight_version")
            if version is not None and str(version) != str(wanted):
                reason = f"reports weight version {version!r}, wanted is {wanted}"
                self.pool.set_state(worker, WorkerState.QUARANTINED, reason)


async def flush(http: Http, url: str, *, timeout: float | None = None, must: bool = True) -> None:
    """Make a server drop its cached prefixes.

    The call is separate from the weight update, because SGLang dies if an update has to flush and cannot. The call is
    repeated while the server refuses, because a request counts as running for a moment after its answer.

    Raises:
        EngineError: Requests still ran after `timeout` seconds, and `must` forbids to keep the old prefixes.
    """
    limit = FLUSH_TIMEOUT_S if timeout is None else timeout

    async def ask() -> Answer:
        return await http.send("POST", url, "/flush_cache", {}, timeout=max(limit, _FLUSH_POLL_S), accept=(400,))

    again = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_result(lambda answer: must and answer.status == 400),
        stop=tenacity.stop_after_delay(limit), wait=tenacity.wait_fixed(_FLUSH_POLL_S),
    )  # fmt: skip
    try:
        await again(ask)
    except tenacity.RetryError:
        message = f"its cache could not be flushed within {limit:.3g} s: requests are still running"
        raise engine_error(f"{url}/flush_cache", message, 400) from None


def _ranks(answer: Mapping[str, Any]) -> list[dict[str, int]]:
    """Return the running and waiting requests of each data-parallel rank; empty if an old server reports no load.

    Reads the answer of one of slime's servers, or of SGLang's /v1/loads. Raises EngineError.
    """
    ranks, suffix = ([answer], "") if "num_running" in answer else (answer.get("loads") or (), "_reqs")
    with expecting("loads, a list with num_running_reqs and num_waiting_reqs of each rank", _LOADS, answer):
        return [{key: int(rank[key + suffix] or 0) for key in ("num_running", "num_waiting")} for rank in ranks]
