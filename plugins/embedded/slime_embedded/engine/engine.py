"""The embedded rollout engine: `EngineCore`, driven by a task in the caller's event loop.

The rollout stage and the HTTP server use this class. By default a step runs inside the loop, between two turns of
the callers' coroutines, so the order of all operations depends only on the inputs. `step_in_thread` moves steps to one
worker thread so that a server can respond during a long step. Calls that change the core wait for that step.

    generate() -> core.add_request -> [driver: step, step, ...] -> future -> GenerationOutput
                  notify() wakes the driver; may_step() False puts it to sleep until the next notify()
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from slime_core.errors import EngineError
from slime_core.protocols import Args, EngineTraits
from slime_core.sample import GenerationOutput
from slime_core.waits import waiting
from slime_embedded.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from slime_embedded.engine.core import EngineCore
    from slime_embedded.engine.sequence import Sequence

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Request:
    """The caller's side of a sequence."""

    def __init__(self, streaming: bool, routed_experts: bool) -> None:
        self.routed_experts = routed_experts
        self.done: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self.chunks: asyncio.Queue[GenerationOutput] | None = asyncio.Queue() if streaming else None


class EmbeddedEngine:
    """A `RolloutEngine` in this process. `EmbeddedEngine(args)` loads nothing before `start`."""

    weight_transports: ClassVar[tuple[str, ...]] = ("tensor", "disk")
    traits = EngineTraits(
        true_on_policy=True,
        returns_routed_experts=True,
        returns_sampling_mask=True,
        takes_adapters=True,
        pause_modes=("abort", "in_place", "retract"),
        uses=frozenset({"colocate", "kernels", "model_impl", "offload_rollout", "update_weight_pause_mode"}),
    )

    def __init__(self, args: Args, *, step_in_thread: bool = False) -> None:
        self._args = args
        self._step_in_thread = step_in_thread
        self.may_step: Callable[[], bool] | None = None
        """Function called before every step; False makes the driver wait for `notify`."""
        self.core: EngineCore | None = None
        """Core of the engine, between `start` and `stop`; else None."""
        self._requests: dict[str, tuple[Sequence, _Request]] = {}
        self._numbers = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._pool: ThreadPoolExecutor | None = None
        self._cleanups: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._server: tuple[str, int, Callable[[], Awaitable[None]]] | None = None

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ConfigError, WeightSyncError (checkpoint and config disagree)."""
        if self._driver is not None:
            return
        from slime_embedded.engine.loading import load_core

        if self._step_in_thread:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="slime-engine")
            self.core = await asyncio.get_running_loop().run_in_executor(self._pool, load_core, self._args)
        else:
            self.core = load_core(self._args)
        self._failure = None
        self._driver = asyncio.create_task(self._drive(), name="slime-engine")

    async def address(self) -> tuple[str, int]:
        """Serve SGLang's HTTP API on a free port in this event loop until `stop`, with the installed server plugin.

        Only this machine can connect, unless SLIME_HOST_IP sets an address for other machines. Raises EngineError if no
        server plugin is installed.
        """
        if self._server is None:
            from slime_embedded.engine.loading import http_server

            self._server = await http_server()(self, os.environ.get("SLIME_HOST_IP") or "127.0.0.1", 0)
        return self._server[:2]

    async def stop(self) -> None:
        """Abort running requests and free the model."""
        server, self._server = self._server, None
        if server is not None:
            await server[2]()
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if not self.failed:
            await self.abort()
        driver.cancel()
        await asyncio.gather(driver, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        self.core = None

    def notify(self) -> None:
        """Make the driver look again: a request came, or `may_step` may have changed its answer."""
        self._wake.set()

    # -- generating ------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Seq[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        logprob_start: int | None = None,
        top_logprobs: int = 0,
        return_routed_experts: bool | None = None,
        adapter: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`.

        Args:
            input_ids: The prompt.
            sampling_params: Sampling parameters with SGLang's keys.
            rid: Request id for `abort`; unique among running requests.
            session_id: Unused here; one engine serves all sessions.
            logprob_start: Also report log-probs of the prompt from this position on.
            top_logprobs: Also report this many most likely tokens per step, and per prompt token with a log-prob.
            return_routed_experts: Also report the experts of every token but the last; None: if the run replays them.
            adapter: Adapter of `--lora-adapters` that generates; None: the shared one, or the whole model.

        Raises:
            EngineError: The request is invalid, or the engine stopped.
        """
        sequence, request = await self._submit(
            input_ids, sampling_params, rid, False, logprob_start, top_logprobs, return_routed_experts, adapter
        )
        try:
            with waiting("an answer of the engine", deadline=None, then="--rollout-timeout ends the sample"):
                return await request.done
        finally:
            self._drop(sequence)

    async def stream(
        self,
        input_ids: Seq[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        logprob_start: int | None = None,
        top_logprobs: int = 0,
        return_routed_experts: bool | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Generate as `generate`, and yield the output so far after each step; the last output has a finish reason.

        Only the last output has routed experts.
        """
        sequence, request = await self._submit(
            input_ids, sampling_params, rid, True, logprob_start, top_logprobs, return_routed_experts, adapter
        )
        assert request.chunks is not None
        getter: asyncio.Future[GenerationOutput] | None = None
        try:
            while True:
                getter = asyncio.ensure_future(request.chunks.get())
                await asyncio.wait({getter, request.done}, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    chunk = getter.result()
                    while not request.chunks.empty():
                        chunk = request.chunks.get_nowait()
                    if not request.done.done():
                        yield chunk
                if request.done.done():
                    yield request.done.result()
                    return
        finally:
            if getter is not None:
                getter.cancel()
            self._drop(sequence)

    async def _submit(
        self,
        input_ids: Seq[int],
        sampling_params: Mapping[str, Any],
        rid: str | None,
        streaming: bool,
        logprob_start: int | None,
        top_logprobs: int,
        routed: bool | None,
        adapter: str | None,
    ) -> tuple[Sequence, _Request]:
        name = rid if rid is not None else f"request-{next(self._numbers)}"
        if routed is None:
            routed = self._args.use_rollout_routing_replay
        if routed and self._running_core().config.moe is None:
            raise EngineError("routed experts were asked for, but the model served is dense")
        request = _Request(streaming, routed)
        params = SamplingParams.parse(sampling_params)
        if params.constrained:
            await asyncio.to_thread(self._running_core().constraints.load)

        def add(core: EngineCore) -> Sequence:
            sequence = core.add_request(
                input_ids, params, name,
                streaming=streaming, logprob_start=logprob_start, top_logprobs=top_logprobs, adapter=adapter,
            )  # fmt: skip
            self._requests[name] = (sequence, request)
            return sequence

        sequence = await self._locked(add)
        self.notify()
        return sequence, request

    def _drop(self, sequence: Sequence) -> None:
        """End the caller's request if it still runs. This does not await, since the caller may be being cancelled."""
        if sequence.finish is None and self.core is not None and not self.failed:
            task = asyncio.ensure_future(self.abort(sequence.rid))
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)

    # -- control ---------------------------------------------------------------------------------------

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with finish reason "abort" and the tokens it has."""
        await self._locked(lambda core: self._settle(core, core.abort(rid)))

    async def pause(self, mode: str = "in_place") -> None:
        """Stop stepping; "in_place" keeps requests and rows, "retract" gives rows up, "abort" ends requests."""
        await self._locked(lambda core: self._settle(core, core.pause(mode)))

    async def resume(self) -> None:
        """Resume after `pause`."""
        await self._locked(lambda core: core.resume())
        self.notify()

    async def flush_cache(self) -> None:
        """Clear cached prefixes."""
        await self._locked(lambda core: core.flush_cache())

    async def release_memory(self, tags: Seq[str] | None = None) -> None:
        """Free "weights", "kv_cache" or both; weights are lost until an update. Raises EngineError unless idle."""
        await self._locked(lambda core: core.release_memory(tags))

    async def resume_memory(self, tags: Seq[str] | None = None) -> None:
        """Allocate the memory again and resume waiting requests. Raises EngineError for weights without an update."""
        await self._locked(lambda core: core.memory.resume(tags))
        self.notify()

    async def update_weights_from_tensor(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load named HF-layout tensors. Raises WeightSyncError; the old weights then remain in use."""
        await self._updated(lambda core: core.update_weights(weights, version, "update_weights_from_tensor"))

    async def update_weights_from_disk(self, path: Path, version: int) -> None:
        """Load an HF-layout directory. Raises WeightSyncError, and then the old weights still serve."""
        await self._updated(lambda core: core.update_weights_from_disk(Path(path), version))

    async def _updated(self, update: Callable[[EngineCore], None]) -> None:
        """Load new weights between two steps, then treat requests according to `--update-weight-pause-mode`."""

        def apply(core: EngineCore) -> None:
            update(core)
            paused = core.paused
            self._settle(core, core.pause(self._args.update_weight_pause_mode or "in_place"))
            core.paused = paused

        await self._locked(apply)
        self.notify()

    async def weight_checksums(self) -> dict[str, str]:
        """Return HF name -> checksum of the served tensor, in the engine's dtype."""
        return await self._locked(lambda core: core.weight_checksums())

    async def set_weight_version(self, version: int, label: str | None = None) -> None:
        """Set the version of the current weights; no tensor changes."""
        await self._locked(lambda core: core.set_version(version, label))

    async def info(self) -> dict[str, Any]:
        """Return facts about the served model and the load of the engine."""
        core = self._running_core()
        cache = core.scheduler.cache
        return {
            "model_path": str(self._args.hf_checkpoint),
            "model_type": core.config.model_type,
            "weight_version": core.version_label,
            "max_context_length": core.max_context,
            "max_total_num_tokens": cache.max_tokens,
            "num_used_tokens": cache.used_tokens,
            "num_running": core.num_running,
            "num_waiting": core.num_waiting,
            "num_generated_tokens": core.num_generated,
            "paused": core.paused,
            "memory_bytes": core.memory.nbytes(),
            "released": sorted(core.memory.released),
            "dtype": str(core.runner.dtype).removeprefix("torch."),
            "device": str(core.runner.device),
        }

    @property
    def args(self) -> Args:
        """Settings of the engine."""
        return self._args

    @property
    def tokenizer(self) -> Any:
        """HF tokenizer of the model directory, or None."""
        return self._running_core().tokenizer

    @property
    def failed(self) -> bool:
        """True if a step raised, so that the engine no longer serves requests."""
        return self._failure is not None

    @property
    def weight_version(self) -> int:
        """Version of the served weights."""
        return self._running_core().weight_version

    # -- driving ---------------------------------------------------------------------------------------

    def _running_core(self) -> EngineCore:
        if self._failure is not None:
            raise EngineError(f"the engine stopped: {self._failure}") from self._failure
        if self.core is None:
            raise EngineError("the engine is not running; await start() first")
        return self.core

    async def _locked(self, action: Callable[[EngineCore], T]) -> T:
        """Run `action` when no step is in progress."""
        while not self._idle.is_set():
            with waiting("the engine's step", deadline=None, then="a step always ends"):
                await self._idle.wait()
        return action(self._running_core())

    async def _drive(self) -> None:
        core = self._running_core()
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not core.has_work or (self.may_step is not None and not self.may_step()):
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                if self._pool is None:
                    changed = core.step()
                else:
                    self._idle.clear()
                    try:
                        changed = await loop.run_in_executor(self._pool, core.step)
                    finally:
                        self._idle.set()
                self._settle(core, changed)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a task does not raise it, and waiting callers would hang
            logger.exception("the engine stopped")
            self._failure = error
            for _, request in self._requests.values():
                if not request.done.done():
                    request.done.set_exception(EngineError(f"the engine stopped: {type(error).__name__}: {error}"))
            self._requests.clear()

    def _settle(self, core: EngineCore, changed: Iterable[Sequence]) -> None:
        """Pass results to the callers of ended or streaming sequences."""
        for sequence in changed:
            if sequence.finish is None:
                if sequence.streaming:
                    _, request = self._requests[sequence.rid]
                    assert request.chunks is not None
                    request.chunks.put_nowait(self._output(core, sequence, False))
                continue
            entry = self._requests.get(sequence.rid)
            if entry is None or entry[0] is not sequence:
                continue
            del self._requests[sequence.rid]
            if sequence.error is not None and not entry[1].done.done():
                entry[1].done.set_exception(EngineError(f"request {sequence.rid}: {sequence.error}"))
            elif not entry[1].done.done():
                entry[1].done.set_result(self._output(core, sequence, entry[1].routed_experts))

    @staticmethod
    def _output(core: EngineCore, sequence: Sequence, routed_experts: bool) -> GenerationOutput:
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish,
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": sequence.num_output,
            "cached_tokens": sequence.cached_tokens,
            "weight_version": core.version_label,
            "token_weight_versions": sequence.token_versions(),
            "e2e_latency": time.perf_counter() - sequence.created,
        }
        if (first := sequence.logprob_start) is not None:
            meta["input_token_logprobs"] = list(zip([None, *sequence.prompt_log_probs], sequence.prompt_ids[first:]))
            if sequence.top_logprobs:
                meta["input_top_logprobs"] = [None, *sequence.prompt_top]
        if routed_experts:
            meta["routed_experts"] = core.routed_experts(sequence)
        if sequence.top_logprobs:
            meta["output_top_logprobs"] = list(sequence.top)
        if (kept := sequence.kept) is not None:
            meta["output_token_sampling_mask"] = list(kept) or [[]] * sequence.num_output
        return GenerationOutput(sequence.output_ids, list(sequence.log_probs), core.text(sequence), meta)
