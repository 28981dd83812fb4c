"""The simulated generation side: an engine with virtual token times, a generate function, and a reward.

What is generated depends on the sample and the seed alone, how long it takes on the schedule too: so a run that went on
after a crash can be compared with what was seen before it. `SimulatedEngine` gives every token the version that was
served when it came, so an update in the middle of a response shows.
"""

from __future__ import annotations

import asyncio
import copy
import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from slime_core.errors import EngineError
from slime_core.protocols import Args, GenerateTraits
from slime_core.sample import FilterDecision, GenerationOutput, Sample
from slime_core.workers.call import overrun

TOKEN_SECONDS = 0.02
"""Of an engine that is well."""
DEAF_SECONDS = 75.0
"""After which a `late` engine hears an abort: more than a rollout waits for it."""
Ask = Callable[[str], "str | None"]
"""Counts an event of the place named; the kind of fault that strikes it."""


def uniform(*parts: object) -> float:
    """In [0, 1), from nothing but its arguments."""
    return zlib.crc32(repr(parts).encode()) / 2**32


class _Request:
    """One running call: how many of its tokens have come, by which versions."""

    def __init__(self, length: int, seconds_per_token: float, now: float, rid: str | None) -> None:
        self.length, self.seconds, self.rid = length, seconds_per_token, rid
        self.since = now
        self.credit = 0.0
        self.versions: list[int] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.deaf_until = 0.0

    def advance(self, now: float, version: int) -> None:
        """Give the tokens that came since the last call this version."""
        self.credit = min(self.credit + (now - self.since) / self.seconds, float(self.length))
        self.since = now
        self.versions += [version] * (int(self.credit + 1e-6) - len(self.versions))

    def end(self, how: str) -> None:
        """Let the caller have what there is."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.ended.done():
            self.ended.set_result(how)


class SimulatedEngine:
    """A `RolloutEngine` without a model.

    Args:
        ask: Counts events and says what strikes them.
        rng: Draws speeds.
        longest: Tokens of the longest response; lengths have a long tail.
    """

    weight_transports: ClassVar[tuple[str, ...]] = ("tensor",)

    def __init__(self, ask: Ask, rng: random.Random, longest: int) -> None:
        self.weight_version = 0
        self.running: list[_Request] = []
        self.most_running = 0
        self._ask, self._rng, self._longest = ask, rng, longest
        self._paused: asyncio.Event | None = None

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """End what runs."""
        for request in list(self.running):
            request.end("abort")

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """Tokens by and by, at a drawn speed. Raises EngineError when the fault says so."""
        fault = self._ask("engine")
        seed, limit = sampling_params["sampling_seed"], int(sampling_params["max_new_tokens"])
        wanted = self.wanted_length(input_ids, seed)
        length = min(wanted, limit)
        if fault in ("crash", "abort"):
            length = max(1, length // 2)
        for _ in range(2 if fault == "duplicate" else 1):
            how, request = await self._run(length, rid, fault)
        if fault == "crash":
            raise EngineError("the simulated engine died")
        finish = "abort" if how == "abort" or fault == "abort" else "stop" if wanted <= limit else "length"
        count = len(request.versions)
        tokens = [10 + (seed + 7 * (len(input_ids) + i)) % 89 for i in range(count)]
        meta_info = {
            "finish_reason": {"type": finish}, "prompt_tokens": len(input_ids), "completion_tokens": count,
            "cached_tokens": 0, "weight_version": str(self.weight_version), "token_weight_versions": request.versions,
        }  # fmt: skip
        return GenerationOutput(tokens, [-0.5] * count, "t" * count, meta_info)

    def wanted_length(self, input_ids: Sequence[int], seed: int) -> int:
        """Tokens still to come until this response ends by itself; `input_ids` are all before them."""
        drawn = uniform("length", seed, len(input_ids))
        return min(self._longest, 1 + int(1.5 * (1 - 0.999 * drawn) ** -0.9))

    def token_seconds(self) -> float:
        """Of one request's tokens."""
        return TOKEN_SECONDS * (0.5 + self._rng.random())

    async def _run(self, length: int, rid: str | None, fault: str | None) -> tuple[str, _Request]:
        loop = asyncio.get_running_loop()
        if self._paused is not None:
            await self._paused.wait()
        speed = self.token_seconds() * (20 if fault == "slow" else 1)
        request = _Request(length, 1e9 if fault == "hang" else speed, loop.time(), rid)
        request.deaf_until = {"hang": 1e9, "late": loop.time() + DEAF_SECONDS}.get(fault or "", 0.0)
        self.running.append(request)
        self.most_running = max(self.most_running, len(self.running))
        self._time(request)
        try:
            how = await request.ended
        finally:
            self.running.remove(request)
            if request.timer is not None:
                request.timer.cancel()
        request.advance(loop.time(), self.weight_version)
        return how, request

    def _time(self, request: _Request) -> None:
        loop = asyncio.get_running_loop()
        left = (request.length - request.credit) * request.seconds
        if left < 1e6:  # one that hangs has no end
            request.timer = loop.call_later(left, request.end, "done")

    async def abort(self, rid: str | None = None) -> None:
        """End the request of that name, or all, as soon as they listen."""
        loop = asyncio.get_running_loop()
        for request in list(self.running):
            if rid is not None and request.rid != rid:
                continue
            wait = request.deaf_until - loop.time()
            if wait <= 0:
                request.end("abort")
            elif wait < 1e6:
                request.timer = loop.call_later(wait, request.end, "abort")

    async def pause(self, mode: str = "in_place") -> None:
        """No token comes until `resume`; "abort" ends what runs."""
        self._paused = self._paused or asyncio.Event()
        if mode == "abort":
            await self.abort()
            return
        now = asyncio.get_running_loop().time()
        for request in self.running:
            request.advance(now, self.weight_version)
            if request.timer is not None:
                request.timer.cancel()

    async def resume(self) -> None:
        """Go on."""
        paused, self._paused = self._paused, None
        if paused is None:
            return
        now = asyncio.get_running_loop().time()
        for request in self.running:
            request.since = now
            if not request.ended.done():
                self._time(request)
        paused.set()

    async def flush_cache(self) -> None:
        """There is none."""

    async def update_weights_from_tensor(self, weights: Iterable[Any], version: int) -> None:
        """Serve `version` from now on, in the middle of what runs too."""
        now = asyncio.get_running_loop().time()
        for request in self.running:
            if self._paused is None:
                request.advance(now, self.weight_version)
        self.weight_version = version

    async def info(self) -> dict[str, Any]:
        """What an engine says about itself."""
        return {
            "model_path": "simulated", "weight_version": self.weight_version, "max_context_length": 1 << 20,
            "num_running": len(self.running), "num_waiting": 0,
        }  # fmt: skip


class SimulatedGenerator:
    """A generate function: one engine call, or two with a tool between them; some raise, some answer several times."""

    label = "generator 'simulated'"
    traits = GenerateTraits()

    def __init__(self, seed: int, *, failing: float, fan_out: float, two_turns: float) -> None:
        self._seed = seed
        self._failing, self._fan_out, self._two_turns = failing, fan_out, two_turns

    async def call(
        self,
        args: Args,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        evaluation: bool = False,
        context: Any = None,
    ) -> Sample | list[Sample]:
        """Continue the sample."""
        index = (self._seed, evaluation, sample.index)
        turns = 2 if uniform("turns", index) < self._two_turns else 1
        while sample.metadata.get("turn", 0) < turns:
            room = int(sampling_params["max_new_tokens"]) - sample.response_length
            if room <= 0:
                sample.status = Sample.Status.TRUNCATED
                break
            params = {**sampling_params, "max_new_tokens": room}
            output = await context.engine.generate(sample.tokens, params, session_id=sample.session_id)
            sample.append_response_tokens(
                args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
            )
            if sample.status == Sample.Status.ABORTED:
                return sample
            sample.metadata = {**sample.metadata, "turn": sample.metadata.get("turn", 0) + 1}
            if sample.metadata["turn"] < turns:
                await asyncio.sleep(2 * uniform("tool", index))
        sample.metadata = {k: v for k, v in sample.metadata.items() if k != "turn"}
        if uniform("fails", index) < self._failing:
            raise ValueError("this sample never works")
        if not evaluation and uniform("fans out", index) < self._fan_out:
            return [sample, copy.deepcopy(sample)]
        return sample


class SimulatedReward:
    """A reward that takes a while, under the real deadline of a call."""

    label, spec = "reward 'simulated'", "simulated"
    provenance: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, args: Args, ask: Ask, rng: random.Random, *, scores_groups: bool) -> None:
        self.batched = self.scores_groups = scores_groups
        self._args, self._ask, self._rng = args, ask, rng

    async def start(self) -> None:
        """Nothing to load."""

    def under(self, args: Args) -> SimulatedReward:
        """It has no options."""
        return self

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        """One number per sample, from its number alone."""
        fault = self._ask("reward")
        for _ in range(2 if fault == "duplicate" else 1):
            try:
                async with asyncio.timeout(self._args.rm_timeout):
                    await self._wait(fault)
            except TimeoutError:
                raise overrun("--rm-timeout", self._args.rm_timeout) from None
        if fault == "crash":
            raise KeyError("the simulated reward failed")
        return [round(uniform("reward", s.index), 6) for s in samples]

    async def _wait(self, fault: str | None) -> None:
        assert self._args.rm_timeout is not None, "the simulation sets it"
        limit = self._args.rm_timeout
        usual = self._rng.random() ** 4
        seconds = {"hang": 1e9, "late": 1e9, "slow": 0.9 * limit}.get(fault or "", usual)
        try:
            if seconds:
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if fault == "late":  # it does not listen, and answers a moment after nobody waits any more
                await asyncio.sleep(1.0)
            raise


class SimulatedFilter:
    """A dynamic filter that drops a share of the groups, by their number alone."""

    REASON: ClassVar[str] = "unlucky"

    def __init__(self, seed: int, share: float, rescued: float = 0.3) -> None:
        self._seed, self._share, self._rescued = seed, share, rescued

    def drops(self, group_index: int | None) -> bool:
        """Whether it drops the group of that number."""
        return uniform("filter", self._seed, group_index) < self._share

    def __call__(self, args: Args, group: list[Sample]) -> FilterDecision:
        """The decision."""
        number = group[0].group_index
        drop = self.drops(number)
        rescued = uniform("rescue", self._seed, number) < self._rescued
        return FilterDecision(not drop, self.REASON if drop else None, keep_when_insufficient=rescued)
