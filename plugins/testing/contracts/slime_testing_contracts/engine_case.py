"""What the engine suites share: the engine under test, what it lacks, and how an answer is checked.

Runs on a tiny random model. A test gets an engine that others have used before it, and has to leave it as it was:
running, idle, and with the weights of its checkpoint (`restore` puts them back).
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
from slime_core.rollout.engine_weights import deliver
from slime_core.types import GenerationOutput
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
"""Times that a test looks for what a machine with much else to do may let it miss."""

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
"""What an engine may lack: the class attribute `lacks`, of the engine or of the test class, names it."""

_numbers = itertools.count()


@dataclass(frozen=True)
class _Taking:
    """`WeightEngines` of one engine, whose event loop waits for the transport."""

    settings: Args
    engine: Any
    transport: str
    version: int
    loop: asyncio.AbstractEventLoop

    def written(self, directory: Path) -> None:
        """Nobody wants to know."""

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        """Have it take the version."""
        update = deliver(self.settings, self.engine, self.transport, payload, self.version)
        told = asyncio.run_coroutine_threadsafe(update, self.loop).result() or {}
        numbers = all(isinstance(value, int | float) for value in told.values())
        assert numbers, f"an update returns None or metrics, name -> number; found {told!r}"
        return told


class EngineCase(Contract):
    """Base of the engine suites."""

    kind = "engines"
    default_args: ClassVar[Mapping[str, Any]] = {"num_threads": 1, "rollout_max_response_len": 16}
    tolerance: ClassVar[float] = 2e-3
    """How far log-probs may be from those of a float32 forward pass in `transformers`."""
    shared: ClassVar[bool] = True
    """One engine serves all tests of the class; False: each test starts its own."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """Of `CAPABILITIES`. A test of one of them is skipped, or holds the engine to what is said there."""
    long_answer: ClassVar[int] = 480
    """Tokens of requests that something happens to while they run; fewer for an engine that takes its time."""
    deadline: ClassVar[float] = 60.0
    """Seconds for a test's use of the engine."""
    start_deadline: ClassVar[float] = 60.0
    """Seconds to start it."""

    _hosted: ClassVar[EngineHost]
    _home: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _host(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls._hosted, cls._home = EngineHost(), tmp_path_factory.mktemp("engine")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more only wait for each other, on a model this small
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
        """With a tiny random model for `hf_checkpoint`, and directories that last as long as the engine."""
        own = {
            "hf_checkpoint": str(tiny_model()),
            "run_dir": str(self._home),
            "update_weight_disk_dir": str(self._home / "weights"),
            "update_weight_local_checkpoint_dir": str(self._home / "local"),
        }
        return super().settings.model_copy(update={**own, **self.args})

    def check_options(self) -> None:
        """Also of what is said to be lacking."""
        unknown = self.lacking - CAPABILITIES.keys()
        assert not unknown, f"`lacks` names {', '.join(sorted(unknown))}; allowed: {', '.join(CAPABILITIES)}"
        super().check_options()

    # -- the engine ------------------------------------------------------------------------------------

    @property
    def lacking(self) -> frozenset[str]:
        """What the engine's class and this one say."""
        return frozenset(getattr(self.resolved.obj, "lacks", ())) | frozenset(self.lacks)

    @property
    def long(self) -> dict[str, Any]:
        """Sampling parameters of requests that something happens to while they run."""
        return {"temperature": 1.0, "max_new_tokens": self.long_answer, "ignore_eos": True}

    def need(self, *capabilities: str) -> None:
        """Skip the test where the engine lacks one of them."""
        missing = [name for name in capabilities if name in self.lacking]
        if missing:
            pytest.skip("declared to lack " + "; ".join(f"{name} ({CAPABILITIES[name]})" for name in missing))

    def run(self, use: Callable[[Any], Awaitable[T]]) -> T:
        """Have the started engine do something."""
        return self._hosted.use(
            lambda: construct(self.resolved.obj, self.settings),
            use,
            deadline=self.deadline,
            start_deadline=self.start_deadline,
        )

    def run_apart(self, use: Callable[[Any], Awaitable[T]], settings: Any = None) -> T:
        """Have an engine of its own do something; the shared one is stopped before, since it may need the room."""
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
        """Bring the checkpoint's weights, multiplied by `scale`, and `others` instead or besides; their version."""
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
        """The parts of an answer fit each other."""
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
        """Log-probs are those of the temperature-scaled distribution that the tokens were sampled from."""
        self.check(output, params["max_new_tokens"])
        gap = self.gap(prompt, output, temperature=params["temperature"], scale=scale)
        assert gap <= self.tolerance, f"log-probs are up to {gap:.2g} from those of transformers at that temperature"

    def gap(self, prompt: Sequence[int], output: GenerationOutput, *, temperature: float, scale: float = 1.0) -> float:
        """Largest difference to a log-prob of `transformers`; 0 for an answer without tokens."""
        expected = reference.log_probs(prompt, output.token_ids, temperature=temperature, scale=scale)
        return max(map(abs, (torch.tensor(output.log_probs, dtype=torch.float64) - expected).tolist()), default=0.0)

    @staticmethod
    def finish(output: GenerationOutput) -> Any:
        """The type of the finish reason."""
        found = output.meta_info.get("finish_reason")
        assert isinstance(found, Mapping), f'meta_info["finish_reason"] is {{"type": ...}}; found {found!r}'
        return found.get("type")

    # -- requests that run -----------------------------------------------------------------------------

    @staticmethod
    def name() -> str:
        """A name for a request that none had before."""
        return f"r{next(_numbers)}."

    @staticmethod
    async def until(engine: Any, count: int) -> None:
        """Until as many requests run or wait as told; the test's deadline ends it."""
        while True:
            info = await engine.info()
            if info["num_running"] + info["num_waiting"] == count:
                return
            await asyncio.sleep(0.005)

    async def in_the_middle(
        self, engine: Any, prompts: Sequence[Sequence[int]], names: Sequence[str]
    ) -> list[asyncio.Task[GenerationOutput]]:
        """Long requests, each of which has some tokens by now, and not all; made again when one was over first."""
        await engine.info()  # the first call may take as long as an answer of a model this small
        for _ in range(LOOKS):
            tasks = [asyncio.ensure_future(engine.generate(p, self.long, rid=n)) for p, n in zip(prompts, names)]
            seen = asyncio.ensure_future(self.until(engine, len(tasks)))
            await asyncio.wait([seen, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if seen.done():
                await seen
                # Whoever answers this has let the long ones step as well.
                await engine.generate([9, 9, 9], {**GREEDY, "max_new_tokens": 4})
            if not any(task.done() for task in tasks):
                return tasks
            seen.cancel()
            await asyncio.gather(*tasks)
        raise AssertionError(f"a request of {self.long['max_new_tokens']} tokens is over before it is seen to run")
