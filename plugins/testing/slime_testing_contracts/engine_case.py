"""The base class of the engine suites: the engine under test, its missing capabilities, and checks of answers.

The suites use a tiny random model. Tests share an engine, and each test must leave it in its initial state: running,
idle, and with the weights of its checkpoint (`restore` loads them again).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from slime_core.plugins.resolve import resolve
from slime_core.plugins.signatures import construct
from slime_core.protocols import Args
from slime_core.rollout.stage import deliver
from slime_core.sample import GenerationOutput
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.base import Contract
from slime_testing_contracts.engine_host import EngineHost
from slime_testing_contracts.tiny import tiny_model

T = TypeVar("T")
CUT = "length"
"""Finish reason of an answer that reached `max_new_tokens`."""
FINISHES = ("stop", CUT, "abort")
PROMPT = [11, 9, 4, 12, 7]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "max_new_tokens": 8, "ignore_eos": True}
LOOKS = 20
"""Number of attempts to observe a state that a busy machine may cause a test to miss."""

CAPABILITIES = {
    "text": "`GenerationOutput.text`",
    "stop_strings": "the sampling parameter `stop`",
    "min_new_tokens": "the sampling parameter `min_new_tokens`",
    "filters": "the sampling parameters `top_k` and `top_p`",
    "seeds": "equal `sampling_seed`, equal answer",
    "names": "abort(rid) ends that request alone, and none whose name begins with it",
    "in_flight_updates": "requests that run go on with the new weights; without it an update ends them (abort)",
    "unknown_weights": "an update with a name that the model does not have is refused",
    "old_weights": "after a refused update the old weights still serve; without it nothing does until a restart",
    "readback": "`weight_checksums` or `differing_weights`",
    "http": "`address`",
    "restart": "`start` after `stop`",
}
"""Optional capability -> its meaning; the class attribute `lacks` of the engine or test class lists missing ones."""

_numbers = itertools.count()


@dataclass(frozen=True)
class _Taking:
    """A `WeightEngines` for one engine, whose event loop waits for the transport."""

    settings: Args
    engine: Any
    transport: str
    version: int
    loop: asyncio.AbstractEventLoop

    def written(self, directory: Path) -> None:
        """Ignore the notification."""

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        """Make the engine load the version."""
        update = deliver(self.settings, self.engine, self.transport, payload, self.version)
        told = asyncio.run_coroutine_threadsafe(update, self.loop).result() or {}
        numbers = all(isinstance(value, int | float) for value in told.values())
        assert numbers, f"an update returns None or metrics, name -> number; found {told!r}"
        return told


class EngineCase(Contract):
    """Base class of the engine suites."""

    kind = "engines"
    default_args: ClassVar[Mapping[str, Any]] = {"num_threads": 1, "rollout_max_response_len": 16}
    tolerance: ClassVar[float] = 2e-3
    """Largest allowed difference of log-probs to a float32 forward pass in `transformers`."""
    shared: ClassVar[bool] = True
    """True if all tests of the class share an engine; False if each test starts its own."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """Missing capabilities of `CAPABILITIES`. Their tests are skipped, or check the alternative described there."""
    long_answer: ClassVar[int] = 480
    """Tokens of requests that are interrupted while they run; use fewer for a slow engine."""
    deadline: ClassVar[float] = 60.0
    """Maximum seconds for a test's use of the engine."""
    start_deadline: ClassVar[float] = 60.0
    """Maximum seconds for the engine's start."""

    _hosted: ClassVar[EngineHost]
    _home: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _host(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls._hosted, cls._home = EngineHost(), tmp_path_factory.mktemp("engine")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more threads do not help with such a small model
        yield
        torch.set_num_threads(threads)
        cls._hosted.close(cls.start_deadline)

    @pytest.fixture(autouse=True)
    def _as_it_was(self, _host: None) -> Iterator[None]:
        yield
        if not self.shared:
            self._hosted.discard(self.start_deadline)
        elif self._hosted.changed and self._hosted.engine is not None:
            self.run(lambda engine: self.push(engine, engine.weight_transports[0], 1.0))
            self._hosted.changed = False

    @property
    def settings(self) -> Args:
        """Settings with a tiny random model as `hf_checkpoint`, and directories that last as long as the engine."""
        own = {
            "hf_checkpoint": str(tiny_model()),
            "run_dir": str(self._home),
            "update_weight_disk_dir": str(self._home / "weights"),
            "update_weight_local_checkpoint_dir": str(self._home / "local"),
        }
        return super().settings.model_copy(update={**own, **self.args})

    def check_options(self) -> None:
        """Check the options and the names in `lacks`."""
        unknown = self.lacking - CAPABILITIES.keys()
        assert not unknown, f"`lacks` names {', '.join(sorted(unknown))}; allowed: {', '.join(CAPABILITIES)}"
        super().check_options()

    # -- the engine ------------------------------------------------------------------------------------

    @property
    def lacking(self) -> frozenset[str]:
        """Missing capabilities, declared by the engine's class or this class."""
        return frozenset(getattr(self.resolved.obj, "lacks", ())) | frozenset(self.lacks)

    @property
    def long(self) -> dict[str, Any]:
        """Sampling parameters of requests that are interrupted while they run."""
        return {"temperature": 1.0, "max_new_tokens": self.long_answer, "ignore_eos": True}

    def need(self, *capabilities: str) -> None:
        """Skip the test if the engine lacks a capability."""
        missing = [name for name in capabilities if name in self.lacking]
        if missing:
            pytest.skip("declared to lack " + "; ".join(f"{name} ({CAPABILITIES[name]})" for name in missing))

    def run(self, use: Callable[[Any], Awaitable[T]]) -> T:
        """Run `use` with the started engine."""
        return self._hosted.use(
            lambda: construct(self.resolved.obj, self.settings),
            use,
            deadline=self.deadline,
            start_deadline=self.start_deadline,
        )

    def run_apart(self, use: Callable[[Any], Awaitable[T]], settings: Any = None) -> T:
        """Run `use` with a separate engine; the shared engine is stopped first to free its memory."""
        self._hosted.discard(self.start_deadline)
        host = EngineHost()
        try:
            return host.use(
                lambda: construct(self.resolved.obj, self.settings if settings is None else settings),
                use,
                deadline=self.deadline,
                start_deadline=self.start_deadline,
            )
        finally:
            host.close(self.start_deadline)

    async def push(
        self, engine: Any, transport: str, scale: float, others: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Send the checkpoint's weights times `scale`, replaced or extended by `others`; return their version."""
        host = self._hosted
        host.version += 1
        host.changed, version = True, host.version
        if transport not in host.transports:
            host.transports[transport] = resolve("weight_transports", transport).obj(self.settings)
        weights = reference.weights(scale) | dict(others or {})
        taking = _Taking(self.settings, engine, transport, version, asyncio.get_running_loop())
        await asyncio.to_thread(host.transports[transport].send, iter(weights.items()), version, taking)
        return version

    # -- answers ---------------------------------------------------------------------------------------

    def check(self, output: GenerationOutput, limit: int) -> None:
        """Check that the parts of an answer are consistent."""
        count = len(output.token_ids)
        assert count <= limit, f"max_new_tokens is {limit}; the answer has {count} tokens"
        assert len(output.log_probs) == count, f"{count} tokens with {len(output.log_probs)} log-probs"
        bad = [value for value in output.log_probs if not math.isfinite(value) or value > 1e-6]
        assert not bad, f"log-probs are finite and at most 0; found {bad[:5]!r}"
        found = self.finish(output)
        assert found in FINISHES, f"a finish reason is one of {', '.join(FINISHES)}; found {found!r}"
        versions = output.meta_info.get("token_weight_versions")
        assert versions is None or len(versions) == count, f"{count} tokens with {len(versions)} weight versions"

    def check_parity(
        self, prompt: Sequence[int], output: GenerationOutput, params: Mapping[str, Any], scale: float = 1.0
    ) -> None:
        """Check that log-probs are from the temperature-scaled distribution of the sampling."""
        self.check(output, params["max_new_tokens"])
        gap = self.gap(prompt, output, temperature=params["temperature"], scale=scale)
        assert gap <= self.tolerance, f"log-probs are up to {gap:.2g} from those of transformers at that temperature"

    def gap(self, prompt: Sequence[int], output: GenerationOutput, *, temperature: float, scale: float = 1.0) -> float:
        """Return the largest difference to a log-prob of `transformers`; 0 for an answer without tokens."""
        expected = reference.log_probs(prompt, output.token_ids, temperature=temperature, scale=scale)
        return max(map(abs, (torch.tensor(output.log_probs, dtype=torch.float64) - expected).tolist()), default=0.0)

    @staticmethod
    def finish(output: GenerationOutput) -> Any:
        """Return the type of the finish reason."""
        found = output.meta_info.get("finish_reason")
        assert isinstance(found, Mapping), f'meta_info["finish_reason"] is {{"type": ...}}; found {found!r}'
        return found.get("type")

    # -- requests that run -----------------------------------------------------------------------------

    @staticmethod
    def name() -> str:
        """Return a new unique request id."""
        return f"r{next(_numbers)}."

    @staticmethod
    async def until(engine: Any, count: int) -> None:
        """Wait until `count` requests run or wait; the test's deadline limits the wait."""
        while True:
            info = await engine.info()
            if info["num_running"] + info["num_waiting"] == count:
                return
            await asyncio.sleep(0.005)

    async def in_the_middle(
        self, engine: Any, prompts: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[asyncio.Task[GenerationOutput]]:
        """Return running long requests with some but not all tokens; start them again if a request ends too early."""
        await engine.info()  # the first call may take as long as an answer of such a small model
        for _ in range(LOOKS):
            tasks = [asyncio.ensure_future(engine.generate(p, self.long, rid=n)) for p, n in zip(prompts, names)]
            seen = asyncio.ensure_future(self.until(engine, len(tasks)))
            await asyncio.wait([seen, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if seen.done():
                await seen
                # An engine that has answered this request has also stepped the long requests.
                await engine.generate([9, 9, 9], {**GREEDY, "max_new_tokens": 4})
            if not any(task.done() for task in tasks):
                return tasks
            seen.cancel()
            await asyncio.gather(*tasks)
        raise AssertionError(f"a request of {self.long['max_new_tokens']} tokens is over before it is seen to run")
