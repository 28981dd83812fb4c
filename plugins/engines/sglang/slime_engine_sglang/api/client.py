"""Requests for tokens: through the router where there is one, to a server where it is better, elsewhere on failure.

    router --(it drops a field, is down, or failed this request)--> the session's server, or the least busy ready one
                 --(connection lost, 408, 429, 5xx, nonsense, wrong weight version, taken out)--> another one

Sampling again is harmless, so a request is tried again even when its first server may have done it; but some requests
end the server that takes them (`requests` refuses those it knows), so one is given to `TRIES` servers at most. A
connection that was refused does not count: nobody had the request.

A server that is hung does not answer. Asked directly, its requests are cut and tried elsewhere as soon as it is taken
out. Behind the router nothing tells which requests are there: the supervisor kills the server, whose connections break,
and the router tries them elsewhere. A server that is not ours is not killed: all requests at the router are cut then,
and asked of the servers that are left.
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
from slime_core.types import GenerationOutput
from slime_engine_sglang.api.answers import aborted_output, broken_off, is_all_of, versions_in
from slime_engine_sglang.api.continuation import rest_of
from slime_engine_sglang.api.flights import Flight, Flights, server_name
from slime_engine_sglang.api.requests import cuts, generate_request, vocab_size_of
from slime_engine_sglang.api.router import Router
from slime_engine_sglang.api.transport import FIRST_DELAY_S, RETRY_STATUS, Http, backoff, engine_error
from slime_engine_sglang.api.versions import version_number
from slime_engine_sglang.api.worker import Worker, WorkerPool, WorkerState

logger = logging.getLogger(__name__)

TRIES = 4
ROUTER_REST_S = 2.0
"""A router that could not be reached is not asked for so long."""
_LOOK_AGAIN_S = 1.0
_ABANDON_TIMEOUT_S = 5.0
ABORT_AGAIN_S = 1.0
_ABORTS, _LATE = 10, 256


class Client:
    """`generate` and `stream` of an engine; made in the event loop that calls them."""

    def __init__(
        self,
        http: Http,
        pool: WorkerPool,
        router: Router | None,
        args: Args,
        *,
        check_versions: Callable[[], Awaitable[None]] | None = None,
        router_failed: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            http: Open.
            pool: The servers.
            router: In front of them.
            args: The run's settings.
            check_versions: Finds and takes out the servers of a wrong weight version; asked when an answer that came
                through the router has one.
            router_failed: Told when the router could not be reached.
        """
        self.counts: Counter[str] = Counter()
        """requests, retried_requests, continued_requests, bypassed_router, wrong_version_answers, broken_streams."""
        self._http = http
        self._pool = pool
        self._router, self._router_failed = router, router_failed
        self._router_rests_until = 0.0
        self._disaggregated = any(w.role in ("prefill", "decode") for w in pool.workers)
        """Such servers cannot be asked directly, so their requests go through the router whatever it has done."""
        self._dropped: set[str] = set()
        """What the router does not pass on, as far as it was said."""
        self._vocab_size = vocab_size_of(args.hf_checkpoint)
        self._image_token = image_token_of(args.hf_checkpoint)
        self._args = args
        self._check_versions = check_versions
        self._numbers = itertools.count()
        self._prefix = f"slime-{secrets.token_hex(6)}-"
        self._slots = asyncio.Semaphore(args.sglang_server_concurrency * max(len(pool.workers), 1))
        self._flights = Flights(http, pool)
        self._keeps_prefixes_apart = all(version_number(w.software) is not None for w in pool.workers)
        self._aborting: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Take no more notice of the pool."""
        self._flights.close()
        if self._aborting is not None:
            self._aborting.cancel()

    def abort(self, rid: str | None) -> str | None:
        """Nothing new is begun for `rid`, or for any request; returns the name that servers know it by.

        The caller tells the servers. A request may be on its way then, and be overtaken by its abort, which does
        nothing to it: so servers are told again for those that are still there after `ABORT_AGAIN_S`.
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
        session_id: str | None = None, image_data: Sequence[str] = (),
    ) -> GenerationOutput:  # fmt: skip
        """Continue `input_ids`. Raises EngineError."""
        flight = self._flight(input_ids, params, rid, session_id, image_data)
        output: GenerationOutput | None = None
        async for output in self._outputs(flight):  # noqa: B007 - to the end, or it would be given up
            continue
        assert output is not None, "there is one, or an error"
        return output

    def stream(
        self, input_ids: Sequence[int], params: Mapping[str, Any], rid: str | None = None,
        session_id: str | None = None, image_data: Sequence[str] = (),
    ) -> AsyncGenerator[GenerationOutput]:  # fmt: skip
        """Like `generate`, yielding everything so far with each event.

        A stream that breaks before its first token is tried elsewhere. Later it ends with what came, under the finish
        reason "abort": those tokens are as good as any, and whoever continues partial responses can continue this one.
        """
        flight = self._flight(input_ids, params, rid, session_id, image_data)
        flight.body["stream"] = True
        return self._outputs(flight)

    async def _outputs(self, flight: Flight) -> AsyncGenerator[GenerationOutput]:
        """Everything so far, once for each event of a stream, or once; from as many tries as it takes."""
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
        """The servers go on: what waits for that begins."""
        self._flights.wake()

    async def _may_begin(self, flight: Flight) -> bool:
        """False when it was aborted. While the engine is paused it waits here: SGLang 0.5.20 keeps what comes then
        where no abort finds it."""
        while self._pool.paused and not flight.aborted:
            if flight.left <= 0:
                raise EngineError(f"the engine was paused for {self._http.timeout:g} s (--rollout-timeout)")
            await self._flights.change(min(flight.left, _LOOK_AGAIN_S))
        return not flight.aborted

    def _flight(
        self, input_ids: Sequence[int], params: Mapping[str, Any], rid: str | None, session_id: str | None,
        images: Sequence[str],
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
        self.counts["requests"] += 1
        counted = images and self._image_token is not None
        prompt = len(input_ids) if counted else 0
        tells = bool(self._args.use_sampling_mask) and ("return_sampling_mask" in body or not cuts(params))
        return Flight(body, session_id, rid=name, prompt=prompt, tells_mask=tells)

    # -- one try ---------------------------------------------------------------------------------------

    def _route(self, flight: Flight) -> Router | None:
        """The router, when the try that begins goes through it. Raises EngineError when only it could serve it."""
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
        """What the try that begins now is to be answered with: these weights, and no prefix that others have left.

        An update's flush does not see to the second: SGLang refuses it while it is paused with requests in hand, be it
        one that has just been answered, and tells of one data-parallel rank only whether it was done.
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
        """`_one_try` in pieces; a generator costs what a third of all else here does."""
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
        """Where the try goes: a URL, and whose it is if it is no router's."""
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
        """A ready server, which is waited for while somebody brings servers back."""
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
            # No other is ready: give it a moment. It is not held meanwhile, because it may be taken out.
            self._pool.release(worker)
            rested = True
            await self._flights.change(min(backoff(max(flight.tries, 1)), flight.left))

    # -- what a failure means --------------------------------------------------------------------------

    async def _check(self, flight: Flight, output: GenerationOutput, worker: Worker | None) -> None:
        """Raise EngineError for an answer of other weights than were wanted while it was made.

        The version wanted changes when all servers have taken it: until then answers of the coming one are right, too.
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
        raise engine_error(f"{where}/generate", reason, 200)

    def _blame(self, flight: Flight, worker: Worker, error: EngineError) -> None:
        """Have the request avoid the server; one that nothing listens at any more is out for everybody."""
        flight.avoid.add(worker)
        others = any(w is not worker for w in self._pool.ready)
        if not error.reached and worker.state is WorkerState.READY and (others or self._pool.recovering):
            logger.warning("%s does not answer any more: %s", worker.url, error)
            self._pool.set_state(worker, WorkerState.QUARANTINED, str(error))

    def _blame_router(self, flight: Flight, error: EngineError) -> None:
        """Have the request avoid the router; one that could not be reached rests for everybody."""
        flight.direct = True
        now = time.monotonic()
        if error.status is None and now >= self._router_rests_until:
            self._router_rests_until = now + ROUTER_REST_S
            self._router_failed()

    async def _next(self, flight: Flight, error: EngineError) -> None:
        """Make `flight` ready to be tried again, or raise `error`."""
        if flight.aborted:
            return
        again = error.url is not None and (error.status in (None, 200) or error.status in RETRY_STATUS)
        if not again or flight.left <= 0:
            raise error
        if self._router is not None and error.url == f"{self._router.url}/generate":
            self._blame_router(flight, error)
        # Servers that can only be asked through the router are waited for behind it.
        waits = self._disaggregated and error.status == 503
        flight.tries += not self._pool.recovering or (error.reached and not waits)
        if flight.tries >= TRIES:
            raise error
        self.counts["retried_requests"] += 1
        if self._disaggregated:
            await self._flights.change(min(backoff(max(flight.tries, 1)), flight.left))
        # A server that still has the request, though its answer was lost, refuses a second one of that name; and when
        # it notices the lost connection it aborts every request whose name begins with that one's (SGLang 0.5.20).
        flight.body["rid"] = self._other_name(flight)

    def _other_name(self, flight: Flight) -> str:
        return server_name(f"again-{next(self._numbers)}-{flight.rid}")

    def _interrupted(self, flight: Flight, output: GenerationOutput) -> bool:
        """Whether a weight update ended it, and not the caller."""
        reason = output.meta_info.get("finish_reason")
        if flight.aborted or not isinstance(reason, Mapping) or reason.get("type") != "abort":
            return False
        return flight.calm is None or flight.calm != self._pool.interruptions

    async def _go_on(self, flight: Flight, output: GenerationOutput) -> None:
        """Have the rest of it asked for, or all of it where the rest depends on more than the tokens."""
        self.counts["continued_requests"] += 1
        # An image token behind the prompt is one that no image belongs to: no server takes it.
        odd = flight.prompt and self._image_token in output.token_ids
        rest = None if odd else rest_of(flight.body, output)
        if rest is None or not output.token_ids:
            await self._flights.change(min(FIRST_DELAY_S, max(flight.left, 0.0)))
        if rest is not None:
            flight.begun, flight.body = flight.whole(output), rest
        flight.body["rid"] = self._other_name(flight)

    async def _abandon(self, flight: Flight, worker: Worker | None) -> None:
        """Tell the servers that nobody waits for it; the caller is being cancelled, so failure changes nothing."""
        urls = [worker.url] if worker is not None else [w.url for w in self._pool.ready]
        body = {"rid": flight.body["rid"]}
        calls = (
            self._http.send("POST", url, "/abort_request", body, timeout=_ABANDON_TIMEOUT_S, attempts=1) for url in urls
        )
        await asyncio.gather(*calls, return_exceptions=True)


def _aborted(flight: Flight) -> GenerationOutput:
    """What there is of it."""
    return flight.begun or aborted_output(flight.rid, len(flight.body["input_ids"]))


def _between(version: str, oldest: int, newest: int) -> bool:
    return version.isdecimal() and oldest <= int(version) <= newest
