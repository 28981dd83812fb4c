"""A `RolloutEngine` that forwards its work to an engine actor, transparently for the rollout stage that holds it.

    GatedEngine -> EngineProxy.generate -> [driver: all live samples wait] -> EngineActor.advance -> results, in order

`proxy_class` makes it for an engine's class. With `--deterministic-mode` and an engine that `notify` wakes, the stage
sets `may_step`; requests are then collected until it allows a step, and the actor steps until one ends, which is when
anything here can change. So the engine sees the same requests in the same steps as inline. Otherwise each request is a
call of its own. Calls are numbered, since Ray may reorder them, and so are the results that they bring. With an
`EngineRestart` an engine that died is started again under the next `_life`: it takes the weights served, then all
requests that are open. A cancelled caller's request is aborted over there, later.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.errors import EngineError
from slime_core.protocols import Args
from slime_core.sample import GenerationOutput
from slime_launcher_ray.engine_actor import UPDATE, Finished, Request
from slime_launcher_ray.engine_restart import EngineRestart
from slime_launcher_ray.engine_state import EngineState, Update
from slime_launcher_ray.receiver import BucketStream, pack, send
from slime_launcher_ray.wait import EngineGone, Member, awaited

if TYPE_CHECKING:
    import torch


class EngineProxy:
    """Base of the classes that `proxy_class` makes; constructed as `EngineProxy(args)`."""

    weight_transports: tuple[str, ...] = ()
    member: ClassVar[Member]
    engine_class: ClassVar[Any]
    restarter: ClassVar[EngineRestart | None]

    def __init__(self, args: Args) -> None:
        self._args = args
        self.may_step: Callable[[], bool] | None = None
        """Set by the stage if steps depend on the order of events."""
        self._numbers = itertools.count()
        self._new: list[Request] = []
        self._open: dict[int, tuple[Request, asyncio.Future[GenerationOutput]]] = {}
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._stepping = False
        self._started = False
        self._life = -1
        """Number of starts of the engine, less one; the actor refuses calls to an earlier life."""
        self._turns = itertools.count()
        self._early: dict[int, tuple[int, GenerationOutput | EngineError]] = {}
        """Results that arrived before the results of requests that finished earlier."""
        self._next_result = 0
        self._coming: asyncio.Task[None] | None = None
        self._known_state = EngineState()

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine in its actor. Raises what the engine raises."""
        if self._started:
            return
        self.weight_transports = await self._call("start", self._life + 1)
        self._lives(self._life + 1)
        self._started = True

    def _lives(self, life: int) -> None:
        """Begin a new life of the engine: reset the numbers of calls and results."""
        self._life, self._turns = life, itertools.count()
        self._early, self._next_result = {}, 0

    async def stop(self) -> None:
        """Abort what runs and free everything; safe to call twice."""
        started, self._started = self._started, False
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)
        if self._coming is not None:
            self._coming.cancel()
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(EngineError("the engine is being stopped"))
        self._open.clear()
        if started:
            await self._call("stop")

    async def address(self) -> tuple[str, int]:
        """Return host and port of SGLang's HTTP API."""
        host, port = await self._control("address")
        return str(host), int(port)

    # -- generating ----------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        image_data: Sequence[str] = (),
        adapter: str | None = None,
    ) -> GenerationOutput:
        """Generate as `RolloutEngine.generate` does. Raises EngineError."""
        number = next(self._numbers)
        name = rid if rid is not None else f"request-{number}"
        ids, params = list(input_ids), dict(sampling_params)
        named: dict[str, Any] = {"rid": name, "session_id": session_id}
        if image_data:
            named["image_data"] = list(image_data)
        if adapter is not None:
            named["adapter"] = adapter
        if self.may_step is None:
            output: GenerationOutput = await self._abortable(self._surely("generate", ids, params, named), name)
            return output
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(), name="slime-engine-proxy")
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        request = (number, ids, params, named)
        self._open[number] = request, future
        self._new.append(request)
        self._wake.set()
        try:
            return await future
        finally:
            if self._open.pop(number, None) is not None:  # the caller went away
                self._abort_later(name)

    async def _abortable(self, call: Awaitable[Any], name: str) -> Any:
        try:
            return await call
        except asyncio.CancelledError:
            self._abort_later(name)
            raise

    def _abort_later(self, name: str) -> None:
        """Start an abort without awaiting it, as the caller may be in cancellation."""
        if not self._started:
            return
        self._keep(asyncio.ensure_future(self.abort(name)))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task that may never be awaited."""

        def done(task: asyncio.Task[Any]) -> None:
            self._cleanups.discard(task)
            if not task.cancelled():
                task.exception()  # mark the error as retrieved; an awaiting caller still gets it

        self._cleanups.add(task)
        task.add_done_callback(done)

    def notify(self) -> None:
        """Wake the driver: the result of `may_step` may have changed, or a request arrived."""
        self._wake.set()

    async def _drive(self) -> None:
        try:
            await self._forever()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail every open request with the error."""
        failure = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
        self._new.clear()
        for number in list(self._open):
            self._answer(number, failure)

    async def _forever(self) -> None:
        while True:
            self._wake.clear()
            if self._stepping and self._new:
                await self._send()
            elif self._open and not self._stepping and self.may_step is not None and self.may_step():
                self._stepping = True
                new, self._new = self._new, []
                self._keep(asyncio.ensure_future(self._advanced(self._life, self._in_turn("advance", new))))
            await self._wake.wait()

    async def _advanced(self, life: int, reference: Any) -> None:
        """Await a call of `advance` that was already submitted, so that its place among the calls is fixed."""
        try:
            self._settle(await awaited(self.member, reference, "advance"))
        except EngineGone as error:
            try:
                await self._survive(life, error)
            except Exception as failure:
                self._fail(failure)
        except Exception as error:
            self._fail(error)
        finally:
            self._stepping = False
            self._wake.set()

    async def _send(self) -> None:
        while self._new:
            life, (new, self._new) = self._life, (self._new, [])
            try:
                await awaited(self.member, self._in_turn("submit", new), "submit")
            except EngineGone as error:
                await self._survive(life, error)  # then all open requests count as new

    def _settle(self, finished: Finished) -> None:
        """Hand results to their callers, in the order in which the engine finished them."""
        for place, number, result in finished:
            self._early[place] = number, result
        while self._next_result in self._early:
            self._answer(*self._early.pop(self._next_result))
            self._next_result += 1

    def _answer(self, number: int, result: GenerationOutput | EngineError) -> None:
        _, future = self._open.pop(number, (None, None))
        if future is None or future.done():
            return
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)

    # -- control -------------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with finish reason "abort" and the tokens it has."""
        await self._control("abort", rid)

    async def pause(self, mode: str = "in_place") -> None:
        """Stop stepping."""
        await self._control("pause", mode)

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._control("resume")

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""
        await self._control("flush_cache")

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Release memory as the engine does; the launcher has checked that the engine has this method."""
        await self._control("release_memory", tags)

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Resume memory as the engine does."""
        await self._control("resume_memory", tags)

    async def info(self) -> dict[str, Any]:
        """Return the engine's info."""
        found: dict[str, Any] = await self._control("info")
        return found

    async def _control(self, method: str, *args: Any) -> Any:
        """Run a control call to its end even if the caller is cancelled: it returns results of other requests."""
        task = asyncio.ensure_future(self._controlled(method, *args))
        self._keep(task)
        return await asyncio.shield(task)

    async def _controlled(self, method: str, *args: Any) -> Any:
        await self._send()
        result, finished = await self._surely("control", method, *args)
        self._settle(finished)
        self._known_state.note(method, *args)
        return result

    async def _surely(self, method: str, *args: Any) -> Any:
        """Make a call in its turn; repeat it if the engine died and was restarted."""
        while True:
            life = self._life
            try:
                return await awaited(self.member, self._in_turn(method, *args), method)
            except EngineGone as error:
                await self._survive(life, error)

    def _in_turn(self, method: str, *args: Any) -> Any:
        """Submit a call that the actor begins after all earlier calls; return its reference."""
        return self.member.submit("in_turn", self._life, next(self._turns), method, *args)

    async def _call(self, method: str, *args: Any) -> Any:
        """Await the actor. Raises what it raised, and EngineGone when it died."""
        return await awaited(self.member, self.member.submit(method, *args), method)

    # -- an engine that died -------------------------------------------------------------------------------

    async def _survive(self, life: int, error: EngineGone) -> None:
        """Return once the engine has a later life. Raises `error`, or the reason why the engine is given up."""
        if self.restarter is None or not self._started:
            raise error
        if self._life == life:
            if self._coming is None or self._coming.done():
                self._coming = asyncio.ensure_future(self._restart(self.restarter, error))
                self._keep(self._coming)
            await asyncio.shield(self._coming)

    async def _restart(self, restarter: EngineRestart, error: EngineGone) -> None:
        life = self._life
        while self._life == life:
            await restarter.again(error)
            try:
                await self._restore(life + 1)
            except EngineGone as another:
                error = another
        if self.may_step is not None:
            self._new = [request for request, _ in self._open.values()]
            self._wake.set()

    async def _restore(self, life: int) -> None:
        """Restore weights and control state before waiting calls see the new life."""
        await self._call("start", life)
        if self._known_state.update is not None:
            update = self._known_state.update
            if update.in_buckets:
                rest = update.method, update.version
                await asyncio.to_thread(send, self.member, "take_weights", update.payload, *rest)
            else:
                await self._call("update_from", update.method, update.payload, update.version)
        for method, *args in self._known_state.calls():
            await self._call("control", method, *args)
        self._lives(life)

    # -- weights -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return `update_weights_from_<transport>` of any transport; the actor finds the engine's method."""
        if not name.startswith(UPDATE):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return functools.partial(self._update, name)

    async def _update(self, method: str, payload: Any, version: int) -> Mapping[str, float] | None:
        """Send tensors in buckets and anything else, such as a directory, unchanged. Raises WeightSyncError."""
        send = self._send_weights if isinstance(payload, Iterator | BucketStream) else self._hand_over
        measured: Mapping[str, float] | None = await send(method, payload, version)
        return measured

    async def weight_checksums(self) -> dict[str, str]:
        """Return the checksum of each served tensor, by HF name."""
        found: dict[str, str] = await self._control("weight_checksums")
        return found

    async def _hand_over(self, method: str, payload: Any, version: int) -> Any:
        while True:
            life = self._life
            try:
                measured = await self._call("update_from", method, payload, version)
            except EngineGone as error:
                await self._survive(life, error)
            else:
                self._known_state.update = Update(method, payload, version)
                return measured

    async def _send_weights(self, method: str, weights: Iterable[tuple[str, torch.Tensor]], *rest: Any) -> Any:
        """Forward buckets of another actor unchanged; put other pairs into buckets."""
        if isinstance(weights, BucketStream):
            references: Iterable[Any] = weights.references()
        else:
            import ray

            references = ([ray.put(bucket)] for bucket in pack(weights, self._args.update_weight_buffer_size))
        kept: list[Any] = []
        if self.restarter is not None:
            references = _keeping(references, kept)
        while True:
            life, contents = self._life, itertools.chain(list(kept), references)
            try:
                measured = await asyncio.to_thread(send, self.member, "take_weights", contents, method, *rest)
            except EngineGone as error:
                await self._survive(life, error)
                continue
            if self.restarter is not None and method.startswith(UPDATE):
                self._known_state.update = Update(method, kept, rest[0], in_buckets=True)
            return measured


def _keeping(references: Iterable[Any], kept: list[Any]) -> Iterator[Any]:
    for reference in references:
        kept.append(reference)
        yield reference


class _Comparing(EngineProxy):
    """Proxy of an engine that compares weights itself."""

    async def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the HF names of tensors that are served differently."""
        found: list[str] = await self._send_weights("differing_weights", weights)
        return found


def proxy_class(engine_class: Any, member: Member, restarter: EngineRestart | None = None) -> type[EngineProxy]:
    """Return the class that replaces an engine's class: called with `args`, with the same class attributes.

    Args:
        engine_class: The engine's class, which lives in the actor.
        member: That actor.
        restarter: What brings it back when it dies; None: its death is the end of what it was asked for.
    """
    base = _Comparing if hasattr(engine_class, "differing_weights") else EngineProxy
    copied = ("traits", "weight_transports")
    attributes = {name: getattr(engine_class, name) for name in copied if hasattr(engine_class, name)}
    attributes |= {"member": member, "engine_class": engine_class, "restarter": restarter}
    if not hasattr(engine_class, "notify"):
        attributes["notify"] = None
    return type(f"{engine_class.__name__}Proxy", (base,), attributes)
