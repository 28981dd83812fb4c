"""Send requests for tokens through the router, if there is one, or directly to a server; retry elsewhere on failure.

    router --(it drops a field, is down, or failed this request)--> the session's server, or the least busy ready one
                 --(connection lost, 408, 429, 5xx, nonsense, wrong weight version, taken out)--> another one

Sampling again is harmless, so a request is retried even when its first server may have finished it. But some requests
crash their server (`requests` refuses the known ones), so a request is sent to at most `TRIES` servers. A refused
connection does not count, since no server received the request.

A hung server does not respond. When it is taken out, direct requests to it are cut and retried elsewhere. Behind the
router it is unknown which requests the server has: the supervisor kills the server, its connections break, and the
router retries the requests elsewhere. A server that this run did not launch is not killed: all requests at the router
are cut, and sent to the remaining servers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from slime_core.errors import EngineError
from slime_core.multimodal import image_token_of
from slime_core.protocols import Args
from slime_core.sample import GenerationOutput
from slime_engine_http.api.answers import Wire, aborted_output, broken_off, is_all_of, versions_in
from slime_engine_http.api.continuation import rest_of
from slime_engine_http.api.flights import Flight, Flights, server_name
from slime_engine_http.api.requests import cuts, generate_request, vocab_size_of
from slime_engine_http.api.router import Router
from slime_engine_http.api.transport import FIRST_DELAY_S, RETRY_STATUS, Http, backoff, engine_error
from slime_engine_http.api.versions import version_number
from slime_engine_http.api.worker import Worker, WorkerPool, WorkerState

logger = logging.getLogger(__name__)

TRIES = 4
ROUTER_REST_S = 2.0
"""Seconds without requests to a router after it could not be reached."""
_LOOK_AGAIN_S = 1.0
_ABANDON_TIMEOUT_S = 5.0
ABORT_AGAIN_S = 1.0
_ABORTS, _LATE = 10, 256


class Client:
    """Implements `generate` and `stream` of an engine; created in the event loop that calls them."""

    def __init__(
        self,
        http: Http,
        pool: WorkerPool,
        router: Router | None,
        args: Args,
        *,
        wire: Wire | None = None,
        check_versions: Callable[[], Awaitable[None]] | None = None,
        router_failed: Callable[[], object] = lambda: None,
    ) -> None:
        """Create a client.

        Args:
            http: Open connections.
            pool: The servers.
            router: Router in front of the servers, if there is one.
            args: The run's settings.
            wire: Form of the servers' requests for tokens; by default SGLang's.
            check_versions: Finds and takes out servers of a wrong weight version; called when a response through the
                router has a wrong version.
            router_failed: Called when the router could not be reached.
        """
        self.counts: Counter[str] = Counter()
        """requests, retried_requests, continued_requests, bypassed_router, wrong_version_answers, broken_streams."""
        self._http = http
        self._pool = pool
        self._router, self._router_failed = router, router_failed
        self._router_rests_until = 0.0
        self._disaggregated = any(w.role in ("prefill", "decode") for w in pool.workers)
        """True for prefill and decode servers; requests to them always go through the router, even after a failure."""
        self._dropped: set[str] = set()
        """Fields that the router drops, for which a message was logged."""
        self._vocab_size = vocab_size_of(args.hf_checkpoint)
        self._image_token = image_token_of(args.hf_checkpoint)
        self._args = args
        self._check_versions = check_versions
        self._numbers = itertools.count()
        self._prefix = f"slime-{secrets.token_hex(6)}-"
        self._slots = asyncio.Semaphore(args.sglang_server_concurrency * max(len(pool.workers), 1))
        self._wire = wire or Wire()
        self._flights = Flights(http, pool, self._wire)
        self._keeps_prefixes_apart = all(version_number(w.software) is not None for w in pool.workers)
        self._aborting: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop watching the pool."""
        self._flights.close()
        if self._aborting is not None:
            self._aborting.cancel()

    def abort(self, rid: str | None) -> str | None:
        """Start no new try of `rid`, or of any request; return the request's name on the servers.

        The caller sends the abort to the servers. The abort may overtake a request in transit and miss it, so aborts
        are sent again for requests that are still running after `ABORT_AGAIN_S`.
        """
        name = self._flights.abort(rid)
        if self._flights.aborted and (self._aborting is None or self._aborting.done()):
            self._aborting = asyncio.create_task(self._abort_again())
        return name

    async def _abort_again(self) -> None:
        for _ in range(_ABORTS):
            await asyncio.sleep(ABORT_AGAIN_S)
            late = self._flights.aborted
            if not late:
                return
            await asyncio.gather(*(self._abandon(flight, None) for flight in late[:_LATE]))

    async def generate(
        self, input_ids: Sequence[int], params: Mapping[str, Any], rid: str | None = None,
        session_id: str | None = None, image_data: Sequence[str] = (), adapter: str | None = None,
    ) -> GenerationOutput:  # fmt: skip
        """Continue `input_ids`. Raises EngineError."""
        flight = self._flight(input_ids, params, rid, session_id, image_data, adapter)
        output: GenerationOutput | None = None
        async for output in self._outputs(flight):  # noqa: B007 - to the end; a break would abort the request
            continue
        assert output is not None, "there is one, or an error"
        return output

    def stream(
        self, input_ids: Sequence[int], params: Mapping[str, Any], rid: str | None = None,
        session_id: str | None = None, image_data: Sequence[str] = (), adapter: str | None = None,
    ) -> AsyncGenerator[GenerationOutput]:  # fmt: skip
        """Generate like `generate`, yielding the whole output so far at each event.

        A stream that breaks before its first token is retried elsewhere. A stream that breaks later ends with its
        tokens so far and the finish reason "abort": these tokens are valid, and the partial response can be continued.
        """
        flight = self._flight(input_ids, params, rid, session_id, image_data, adapter)
        flight.body["stream"] = True
        return self._outputs(flight)

    async def _outputs(self, flight: Flight) -> AsyncGenerator[GenerationOutput]:
        """Yield the whole output so far, for each event of a stream or once at the end; retry as needed."""
        self._flights.all.add(flight)
        try:
            async with self._slots:
                flight.deadline = time.monotonic() + self._http.timeout
                while await self._may_begin(flight):
                    last: GenerationOutput | None = None
                    try:
                        if not flight.streams:
                            last = await self._one_try(flight)
                            if not self._interrupted(flight, last):
                                yield flight.whole(last)
                                return
                        else:
                            async with aclosing(self._one_stream(flight)) as outputs:
                                async for last in outputs:
                                    if not self._interrupted(flight, last):
                                        yield flight.whole(last)
                    except EngineError as error:
                        if last is not None and last.token_ids:
                            if not flight.streams:
                                raise
                            self.counts["broken_streams"] += 1
                            yield flight.whole(broken_off(last, str(error)))
                            return
                        await self._next(flight, error)
                    else:
                        if last is None or not self._interrupted(flight, last):
                            return
                        await self._go_on(flight, last)
        finally:
            self._flights.all.discard(flight)
        yield _aborted(flight)

    def resumed(self) -> None:
        """Wake the requests that wait for the servers to resume."""
        self._flights.wake()

    async def _may_begin(self, flight: Flight) -> bool:
        """Return False if the request was aborted; wait while the engine is paused.

        SGLang 0.5.20 queues requests that arrive during a pause where no abort reaches them.
        """
        while self._pool.paused and not flight.aborted:
            if flight.left <= 0:
                raise EngineError(f"the engine was paused for {self._http.timeout:g} s (--rollout-timeout)")
            await self._flights.change(min(flight.left, _LOOK_AGAIN_S))
        return not flight.aborted

    def _flight(
        self, input_ids: Sequence[int], params: Mapping[str, Any], rid: str | None, session_id: str | None,
        images: Sequence[str], adapter: str | None,
    ) -> Flight:  # fmt: skip
        name = rid if rid is not None else f"{self._prefix}{next(self._numbers)}"
        body = generate_request(
            input_ids,
            params,
            server_name(name),
            vocab_size=self._vocab_size,
            routed_experts=bool(self._args.use_rollout_routing_replay),
            sampling_mask=bool(self._args.use_sampling_mask),
            image_data=images,
            image_token=self._image_token,
        )
        if adapter is not None:
            body["lora_path"] = adapter
        self._wire.check(params)
        self.counts["requests"] += 1
        counted = images and self._image_token is not None
        prompt = len(input_ids) if counted else 0
        tells = bool(self._args.use_sampling_mask) and ("return_sampling_mask" in body or not cuts(params))
        return Flight(body, session_id, rid=name, prompt=prompt, tells_mask=tells)

    # -- one try ---------------------------------------------------------------------------------------

    def _route(self, flight: Flight) -> Router | None:
        """Return the router if this try goes through it, else None.

        Raises EngineError if the router drops a needed field and the servers cannot be called directly.
        """
        flight.calm = None if self._pool.update_lock.locked() else self._pool.interruptions
        router = self._router
        if router is None:
            return None
        dropped = router.dropped(flight.body)
        if self._disaggregated:
            if dropped and dropped != "sampling_params.sampling_seed":
                raise EngineError(
                    f"{dropped}: the router at {router.url} drops it, and prefill and decode servers"
                    " cannot be asked directly"
                )
            return router
        if dropped and dropped not in self._dropped:
            self._dropped.add(dropped)
            logger.info("requests with %s go to the servers directly: the router drops it", dropped)
        if dropped or flight.direct or time.monotonic() < self._router_rests_until:
            self.counts["bypassed_router"] += 1
            return None
        return router

    def _want(self, flight: Flight) -> None:
        """Set the weight version that this try needs, and a cache key that excludes prefixes of older versions.

        An update's flush does not ensure fresh prefixes: SGLang refuses the flush while it is paused with running
        requests, even just finished ones, and it reports the flush of one data-parallel rank only.
        """
        flight.wanted = self._pool.version_wanted
        kept = self._keeps_prefixes_apart
        flight.prefixes = f"{self._prefix}{flight.wanted}" if kept and flight.wanted is not None else ""

    async def _one_try(self, flight: Flight) -> GenerationOutput:
        url, worker = await self._begin(flight)
        try:
            output = await self._flights.ask(flight, url, worker)
            await self._received(flight, output, worker)
            return output
        except BaseException as error:
            await self._failed(flight, worker, error)
            raise
        finally:
            if worker is not None:
                self._pool.release(worker)

    async def _one_stream(self, flight: Flight) -> AsyncGenerator[GenerationOutput]:
        """Stream one try; separate from `_one_try`, since a generator adds a third to the cost of a request."""
        url, worker = await self._begin(flight)
        try:
            async with aclosing(self._flights.stream(flight, url, worker)) as pieces:
                async for output in pieces:
                    await self._received(flight, output, worker)
                    yield output
        except BaseException as error:
            await self._failed(flight, worker, error)
            raise
        finally:
            if worker is not None:
                self._pool.release(worker)

    async def _begin(self, flight: Flight) -> tuple[str, Worker | None]:
        """Return the URL of this try, and its server; the server is None if the URL is the router's."""
        router = self._route(flight)
        worker = await self._acquire(flight) if router is None else None
        self._want(flight)
        return worker.url if worker is not None else router.url, worker  # type: ignore[union-attr]

    async def _received(self, flight: Flight, output: GenerationOutput, worker: Worker | None) -> None:
        if worker is not None:
            self._pool.progressed(worker)
        await self._check(flight, output, worker)

    async def _failed(self, flight: Flight, worker: Worker | None, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            await self._abandon(flight, worker)
        elif isinstance(error, EngineError) and worker is not None:
            self._blame(flight, worker, error)

    async def _acquire(self, flight: Flight) -> Worker:
        """Return a ready server; wait for one while servers are being recovered."""
        rested = False
        while True:
            if flight.aborted:
                raise EngineError("aborted")
            try:
                worker = self._pool.acquire(flight.session_id, avoid=flight.avoid)
            except EngineError as error:
                if not self._pool.recovering:
                    raise
                if flight.left <= 0:
                    raise EngineError(f"{error}; waited {self._http.timeout:g} s (--rollout-timeout)") from None
                await self._flights.change(min(flight.left, _LOOK_AGAIN_S))
                continue
            if rested or worker not in flight.avoid:
                return worker
            # No other server is ready: pause before using this one, and release it meanwhile, as it may be taken out.
            self._pool.release(worker)
            rested = True
            await self._flights.change(min(backoff(max(flight.tries, 1)), flight.left))

    # -- what a failure means --------------------------------------------------------------------------

    async def _check(self, flight: Flight, output: GenerationOutput, worker: Worker | None) -> None:
        """Raise EngineError if the response has a weight version that was not wanted while it was generated.

        The wanted version changes after all servers have loaded it; until then the coming version is valid as well.
        """
        if flight.wanted is None or self._pool.version_wanted is None:
            return
        newest = max(self._pool.version_wanted, self._pool.version_coming or 0)
        if is_all_of(output.meta_info, newest):
            return
        wrong = [v for v in versions_in(output.meta_info) if not _between(v, flight.wanted, newest)]
        if not wrong:
            return
        self.counts["wrong_version_answers"] += 1
        reason = f"answered with weight version {wrong[0]!r}, wanted is {self._pool.version_wanted}"
        if worker is not None:
            self._pool.set_state(worker, WorkerState.QUARANTINED, reason)
        elif self._check_versions is not None:
            await self._check_versions()
        asked = worker or self._router
        where = "" if asked is None else asked.url
        raise engine_error(where + self._wire.path, reason, 200)

    def _blame(self, flight: Flight, worker: Worker, error: EngineError) -> None:
        """Make the request avoid the server; quarantine a server that refuses connections for all requests."""
        flight.avoid.add(worker)
        others = any(w is not worker for w in self._pool.ready)
        if not error.reached and worker.state is WorkerState.READY and (others or self._pool.recovering):
            logger.warning("%s does not answer any more: %s", worker.url, error)
            self._pool.set_state(worker, WorkerState.QUARANTINED, str(error))

    def _blame_router(self, flight: Flight, error: EngineError) -> None:
        """Make the request avoid the router; if the router could not be reached, all requests avoid it for a while."""
        flight.direct = True
        now = time.monotonic()
        if error.status is None and now >= self._router_rests_until:
            self._router_rests_until = now + ROUTER_REST_S
            self._router_failed()

    async def _next(self, flight: Flight, error: EngineError) -> None:
        """Prepare `flight` for another try, or raise `error`."""
        if flight.aborted:
            return
        again = error.url is not None and (error.status in (None, 200) or error.status in RETRY_STATUS)
        if not again or flight.left <= 0:
            raise error
        if self._router is not None and error.url == self._router.url + self._wire.path:
            self._blame_router(flight, error)
        # For servers behind the router only, a 503 means waiting until they are ready.
        waits = self._disaggregated and error.status == 503
        flight.tries += not self._pool.recovering or (error.reached and not waits)
        if flight.tries >= TRIES:
            raise error
        self.counts["retried_requests"] += 1
        if self._disaggregated:
            await self._flights.change(min(backoff(max(flight.tries, 1)), flight.left))
        # A server that still has the request after a lost connection refuses a second request of the same name. When it
        # notices the lost connection, it aborts every request whose name begins with that name (SGLang 0.5.20).
        flight.body["rid"] = self._other_name(flight)

    def _other_name(self, flight: Flight) -> str:
        return server_name(f"again-{next(self._numbers)}-{flight.rid}")

    def _interrupted(self, flight: Flight, output: GenerationOutput) -> bool:
        """Return whether a weight update, not the caller, aborted the request."""
        reason = output.meta_info.get("finish_reason")
        if flight.aborted or not isinstance(reason, Mapping) or reason.get("type") != "abort":
            return False
        return flight.calm is None or flight.calm != self._pool.interruptions

    async def _go_on(self, flight: Flight, output: GenerationOutput) -> None:
        """Request the rest of the response, or all of it if the rest depends on more than the tokens."""
        self.counts["continued_requests"] += 1
        # An image token in the response has no image, so no server accepts it.
        odd = flight.prompt and self._image_token in output.token_ids
        rest = None if odd else rest_of(flight.body, output)
        if rest is None or not output.token_ids:
            await self._flights.change(min(FIRST_DELAY_S, max(flight.left, 0.0)))
        if rest is not None:
            flight.begun, flight.body = flight.whole(output), rest
        flight.body["rid"] = self._other_name(flight)

    async def _abandon(self, flight: Flight, worker: Worker | None) -> None:
        """Abort the request on its server, or on all ready servers; the caller is cancelled, so errors are ignored."""
        urls = [worker.url] if worker is not None else [w.url for w in self._pool.ready]
        body = {"rid": flight.body["rid"]}
        calls = (
            self._http.send("POST", url, "/abort_request", body, timeout=_ABANDON_TIMEOUT_S, attempts=1) for url in urls
        )
        await asyncio.gather(*calls, return_exceptions=True)


def _aborted(flight: Flight) -> GenerationOutput:
    """Return the output of an aborted request: its tokens from earlier tries, or an empty output."""
    return flight.begun or aborted_output(flight.rid, len(flight.body["input_ids"]))


def _between(version: str, oldest: int, newest: int) -> bool:
    return version.isdecimal() and oldest <= int(version) <= newest
