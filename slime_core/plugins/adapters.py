"""Uniform calls of rewards and generate functions, for every form that their authors may choose.

The rollout holds a `RewardCaller`, which limits time and number of the reward's calls, and a `GenerateCaller`, whose
calls the rollout itself limits. The rollout handles failed samples. Keywords are passed only to functions that declare
them by name; `**kwargs` alone declares nothing, as in THUDM/slime.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import math
import os
import pickle
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from slime_core.errors import PluginError
from slime_core.plugins.options import option_name
from slime_core.plugins.registry import Resolved
from slime_core.plugins.signatures import (
    asks_by_name,
    construct,
    declared,
    is_async,
    positional_names,
    signature_of,
    takes_list,
    unbound,
)
from slime_core.protocols import Args, GenerateContext, GenerateTraits, RewardTraits, traits_of
from slime_core.sample import LARGEST_SCORE, Sample, is_score
from slime_core.waits import by_deadline, placed, waiting
from slime_core.workers.call import Slots, awaited, contained, on_thread, overrun

logger = logging.getLogger(__name__)

THREADS = Slots(min(32, (os.cpu_count() or 1) + 4))
"""Places of the threads that all rewards of the process share. A call's deadline begins when it has a place."""
EXECUTIONS = ("inline", "thread", "process")
"""Allowed values of the trait `execution`::

    inline     on the event loop's thread: trivially fast pure functions only, since everything waits for them
    thread     in this process: shares state with the run; a call that overruns is abandoned, not ended
    process    in a worker process, which is killed if the call overruns; a crash of the call ends only the worker
               default for a plain function; an `async` one runs on the event loop, unless it declares "process"
"""

LOAD_DEADLINE = 600.0
"""Seconds that importing and building a component may take; a local judge model may be large."""
_READERS_OF_MAPPINGS = ("eval_reward_key", "custom_reward_post_process_path")
"""Settings, besides `reward_key`, with which a reward may return a mapping."""


class PluginNotFiniteError(PluginError):
    """A reward has the right type, but is NaN, infinite or too large for this sample."""


@dataclasses.dataclass(frozen=True)
class Component:
    """The data from which a worker loads a reward by itself."""

    spec: str
    group: bool = False
    options: bytes = b""
    """Pickled value of the setting `plugins` for this component; empty to use the run's."""

    @functools.cached_property
    def key(self) -> str:
        """Name of the loaded component within a worker."""
        return f"{self.spec}|{int(self.group)}|{self.options.hex()}"


class Workers(Protocol):
    """Processes in which rewards run, each of which resolves them again."""

    async def load(self, component: Component) -> None:
        """Start every process, and wait until one has loaded the component. Raises as `score`."""

    async def score(
        self, component: Component, samples: Sequence[Sample], evaluation: bool, timeout: float | None, seed: int = 0
    ) -> list[float | dict[str, Any]]:
        """Return the rewards of the samples, and copy the reward's changes into them; see `RewardCaller.score`."""

    def settings_changed(self) -> None:
        """Send the current settings to the processes."""

    def close(self) -> None:
        """End the processes; safe to call twice."""


class RewardCaller:
    """Any accepted reward as `await score(samples)`.

    Accepted: `(args, sample)`, `(args, samples)`, a class or instance with `compute_reward(prompts, responses)`, and
    a class or instance with one of the first two as `__call__`; each plain or `async`. Where it runs: `EXECUTIONS`.
    """

    def __init__(
        self,
        reward: Resolved,
        args: Args,
        *,
        workers: Callable[[], Workers] | None = None,
        spec: str | None = None,
        inline: bool = False,
        group: bool = False,
        skips_none: bool = False,
    ) -> None:
        """Build a class, and decide how and where the reward runs. `args` stay the same over the caller's life.

        Args:
            reward: The result of `resolve("rewards", ...)`.
            args: The run's settings, passed to the reward.
            workers: Creates the processes for plain functions at the first call. None runs plain functions on threads.
                A thread is abandoned when its score is cancelled, so a reward that never returns delays neither other
                rewards nor the end of the process.
            spec: The spec that `reward` was resolved from, for workers to resolve again.
            inline: Call plain functions on the event loop's thread, without deadline (used inside a worker).
            group: Call a function with the list of samples, unless its parameter is called `sample` (`--group-rm`).
            skips_none: Return NaN for a sample of which the reward says None: it does not apply.

        Raises:
            PluginError: The component declares an unknown `execution`, or cannot be built.
        """
        self.label = reward.ref.label
        obj = reward.obj
        self._build: _BuiltOnce | None = None
        if inspect.isclass(obj):
            build = functools.partial(construct, obj, args, name=option_name(reward.ref))
            # A class with required parameters besides `args` is a model: built at the first call, and only here.
            self._build = _BuiltOnce(build, self.label) if asks_by_name(obj) and not inline else None
            obj = obj if self._build else build()
        self.args = args
        self._skips_none = skips_none
        self._under = functools.partial(RewardCaller, reward, workers=workers, spec=spec, inline=inline, group=group)
        self.spec = spec or reward.ref.prefix + reward.ref.name
        self.provenance: Mapping[str, object] = reward.ref.provenance()
        self.members: tuple[Resolved, ...] = tuple(getattr(obj, "members", ()))
        """Rewards that a composite reward consists of, as it resolved them."""
        self._scores_texts = hasattr(obj, "compute_reward")
        function: Callable[..., object] = obj.compute_reward if self._scores_texts else obj
        if self._build is not None:
            function = unbound(obj, "compute_reward" if self._scores_texts else "__call__")
        self._function = function
        if group and _takes_one_sample(function):
            group = False
            if not inline:
                logger.warning(
                    "%s scores one 'sample' at a time, so --group-rm has no effect on it; a function of 'samples' gets"
                    " the list of the group",
                    self.label,
                )
        self.batched: bool = group or self._scores_texts or _scores_lists(function)
        """True: one call scores a list. False: the rollout may score every sample as soon as it is generated."""
        self.scores_groups: bool = group or traits_of(obj, RewardTraits, self.label).scores_groups
        """True: the list must be the whole group, since scores depend on each other."""
        self._keywords = declared(function, ("evaluation",))
        self._timeout: float | None = None if inline else args.rm_timeout
        self._slots = Slots(args.rm_concurrency)
        # A fresh interpreter cannot find a reward that was registered by code.
        self._workers = workers if spec is not None and reward.ref.registered is None else None
        self.execution = "here"
        """"inline", "thread", "process" or "async" (see `execution_of`); "here" in a worker."""
        self.component = Component(self.spec, group)
        if not inline:
            default = "thread" if self._workers is None or self._build is not None else "process"
            self.execution = execution_of(obj, self.label, is_async=is_async(function), default=default)
            if self.execution == "process" and self._workers is None:
                self.execution = "async" if is_async(function) else "thread"
            if self.execution == "process":
                del obj, function
                self._function = _elsewhere  # frees the object built here; every worker builds its own
                self._build = None

    def under(self, args: Args) -> RewardCaller:
        """Return the same reward with settings that differ in `plugins`. Raises as the constructor does."""
        other = self._under(args)
        other.component = dataclasses.replace(other.component, options=pickle.dumps(args.plugins))
        return other

    async def start(self) -> None:
        """Load the component in a worker, if it runs in a worker. Raises the errors of import and construction."""
        if self.execution == "process":
            assert self._workers is not None
            await self._workers().load(self.component)

    async def score(self, samples: Sequence[Sample], evaluation: bool = False) -> list[float | dict[str, Any]]:
        """Return a reward per sample, in order; a reward that takes a single sample is called for each in turn.

        The deadline `--rm-timeout` of a call starts when the call begins to run, reported through `waits.placed`.

        Raises:
            DeadlineExceeded: A call took too long.
            PluginError: The reward returned neither a finite number nor a mapping (with --reward-key or a reward
                post-process function to read it), or a list of another length; or it raised an exception that no task
                may raise (SystemExit, StopIteration, a cancellation of its own).
            Exception: Any exception of the reward, or of its process if the reward ended that.
        """
        if self.execution == "process":
            assert self._workers is not None
            parts = [samples] if self.batched else [[sample] for sample in samples]
            found: list[float | dict[str, object]] = []
            for part in parts:
                seed = self._seed(part)
                found += await self._workers().score(self.component, part, evaluation, self._timeout, seed)
            return found
        keywords = {"evaluation": evaluation} if "evaluation" in self._keywords else {}
        if not self.batched:
            return [self._checked(await self._call(self.args, s, **keywords), s, evaluation) for s in samples]
        if self._scores_texts:
            prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
            values = await self._call(prompts, responses, **keywords)
        else:
            values = await self._call(self.args, given := list(samples), **keywords)
            if any(one is not other for one, other in zip(given, samples)):
                raise PluginError(
                    f"{self.label} reordered the list of samples it was given; it may sort a copy: sorted(...)"
                )
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
            size = f" of {len(values)}" if isinstance(values, Sequence) else ""
            raise PluginError(
                f"{self.label} returned {type(values).__name__}{size}; expected a list of {len(samples)} rewards"
            )
        return [self._checked(value, sample, evaluation) for value, sample in zip(values, samples)]

    async def _call(self, *args: object, **keywords: object) -> object:
        if self._build is not None:
            found = await self._build.built()
            self._function = found.compute_reward if self._scores_texts else found
        call = functools.partial(contained, self.label, functools.partial(self._function, *args, **keywords))
        if self.execution in ("here", "inline"):
            placed()()
            value = call()
        elif self.execution == "thread":
            async with THREADS():
                placed()()
                value = await _bounded(on_thread(call), "--rm-timeout", self._timeout)
        else:
            async with self._slots():
                placed()()
                value = call()
                return await self._awaited(value) if inspect.isawaitable(value) else value
        if not inspect.isawaitable(value):
            return value
        if self.execution == "here":
            await asyncio.sleep(0)  # the caller that drives this coroutine has no loop so far
            return await awaited(self.label, value)
        async with self._slots():
            placed()()
            return await self._awaited(value)

    async def _awaited(self, value: Awaitable[object]) -> object:
        return await _bounded(awaited(self.label, value), "--rm-timeout", self._timeout)

    def _seed(self, samples: Sequence[Sample]) -> int:
        """Return the seed of a worker's random generators for a call, so that a random reward is reproducible."""
        index = next((s.index for s in samples if s.index is not None), 0)
        return (self.args.seed * 1_000_003 + index) % 2**32

    def _checked(self, value: Any, sample: Sample, evaluation: bool) -> float | dict[str, object]:
        """Return the value as a float or a mapping. Raises PluginError with the sample's index for other values."""
        if isinstance(value, Mapping):
            key, flag = self._key(evaluation)
            if key and key not in value:
                raise PluginError(
                    f"{self.label} returned keys {', '.join(map(repr, value))} for sample {sample.index};"
                    f" {flag} asks for {key!r}"
                )
            if key:
                self._number(value[key], sample)
            elif evaluation or not any(getattr(self.args, name, None) for name in _READERS_OF_MAPPINGS):
                raise PluginError(
                    f"{self.label} returned a mapping with keys {', '.join(map(repr, value)) or 'none'} for sample"
                    f" {sample.index}; say which of them is the reward: {flag} KEY"
                )
            return dict(value)
        number = self._number(value, sample)
        if not evaluation and self.args.reward_key:
            raise PluginError(
                f"{self.label} returned the number {number} for sample {sample.index}; --reward-key asks for a mapping"
                f" with {self.args.reward_key!r}"
            )
        return number

    def _key(self, evaluation: bool) -> tuple[str | None, str]:
        """Return the key of the entry that counts in a mapping, and the flag that sets the key."""
        key, eval_key = self.args.reward_key, self.args.eval_reward_key
        if not evaluation:
            return key, "--reward-key"
        uses_own = eval_key or self.args.custom_reward_post_process_path
        return eval_key or key, "--eval-reward-key" if uses_own else "--reward-key"

    def _number(self, value: Any, sample: Sample) -> float:
        if hasattr(value, "item") and hasattr(value, "size"):
            value = value.item()  # a numpy or torch scalar
        if value is None and self._skips_none:
            return math.nan
        if not isinstance(value, (int, float)):
            raise PluginError(
                f"{self.label} returned {type(value).__name__} for sample {sample.index};"
                " expected a number or a mapping of numbers"
            )
        if not is_score(value):
            raise PluginNotFiniteError(
                f"{self.label} returned {value!s:.40} for sample {sample.index}; expected a finite number between"
                f" -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
            )
        return float(value)


class _BuiltOnce:
    """An object that is built on a thread at the first request; concurrent requests wait for it."""

    def __init__(self, build: Callable[[], object], label: str) -> None:
        self._build, self._label = build, label
        self._lock = threading.Lock()
        self._object: object = None

    async def built(self) -> Any:
        """Return the object. Raises the errors of its construction, and DeadlineExceeded."""
        if self._object is None:
            with waiting(f"the building of {self._label}", deadline=LOAD_DEADLINE, then="the sample fails"):
                await _bounded(on_thread(self._once), "the limit of building it,", LOAD_DEADLINE)
        return self._object

    def _once(self) -> None:
        with self._lock:
            if self._object is None:
                self._object = self._build()


async def _bounded(value: Awaitable[object], flag: str, seconds: float | None) -> object:
    return await by_deadline(value, seconds, lambda: overrun(flag, seconds))


def _elsewhere(*args: object, **keywords: object) -> object:
    raise AssertionError("this reward runs in worker processes")


def execution_of(obj: object, label: str, *, is_async: bool, default: str) -> str:
    """Return "inline", "thread", "process" or "async".

    Args:
        obj: Function, class or instance, perhaps with traits.
        label: Begins the error message.
        is_async: Whether calling `obj` returns an awaitable.
        default: Value for a plain component that declares no `execution`.

    Raises:
        PluginError: The trait has another value, or is "thread" for a coroutine.
    """
    declared = traits_of(obj, RewardTraits, label).execution
    if declared is None:
        return "async" if is_async else default
    if declared not in EXECUTIONS:
        raise PluginError(f"{label}: execution = {declared!r}; write one of {', '.join(map(repr, EXECUTIONS))}")
    if is_async and declared == "thread":
        raise PluginError(
            f"{label}: execution = 'thread', but it is async; make it a plain function, or declare 'process'"
        )
    return "async" if is_async and declared == "inline" else declared


def _scores_lists(function: Callable[..., object]) -> bool:
    return traits_of(function, RewardTraits).scores_groups or takes_list(function)


def _takes_one_sample(function: Callable[..., object]) -> bool:
    """Return whether the second positional parameter is called `sample`."""
    signature = signature_of(function)
    return signature is not None and positional_names(signature)[1:2] == ["sample"]


class GenerateCaller:
    """Any accepted generate function as `await call(...)`."""

    def __init__(self, generator: Resolved) -> None:
        self.label = generator.ref.label
        self._function: Callable[..., object] = generator.obj
        self._takes_list = takes_list(self._function)
        offered = ("evaluation", "context", *(("sampling_params",) if self._takes_list else ()))
        self._keywords = declared(self._function, offered)
        self.takes_context = "context" in self._keywords
        """False: the function reaches the engine, if at all, through `args.sglang_router_ip` and `_port`."""
        self.traits = traits_of(self._function, GenerateTraits, self.label)

    def check(self, args: Args, *, training: bool) -> None:
        """Run the function's own check of the settings before the run starts (its trait `check`).

        Args:
            args: Settings of the run, or of the evaluation data set that names the function.
            training: Whether its samples may be trained on.

        Raises:
            ConfigError: The function does not work with these settings.
        """
        if self.traits.check is not None:
            self.traits.check(args, training=training)

    async def call(
        self,
        args: Args,
        sample: Sample,
        sampling_params: Mapping[str, object],
        *,
        evaluation: bool = False,
        context: GenerateContext | None = None,
    ) -> Sample | list[Sample]:
        """Generate; the function gets its own copy of `sampling_params`.

        Raises:
            PluginError: The function returned neither a sample nor a non-empty list of samples.
            Exception: Any exception of the function.
        """
        offered = {"evaluation": evaluation, "context": context, "sampling_params": dict(sampling_params)}
        keywords = {name: offered[name] for name in self._keywords}
        # The list has one sample, so deadline, failure and engine place stay separate for each sample.
        given = ([sample],) if self._takes_list else (sample, offered["sampling_params"])
        call = functools.partial(self._function, args, *given, **keywords)
        result = contained(self.label, call)
        if inspect.isawaitable(result):
            result = await awaited(self.label, result)
        if isinstance(result, Sample):
            return result
        if isinstance(result, list) and result and all(isinstance(item, Sample) for item in result):
            return result
        raise PluginError(
            f"{self.label} returned {type(result).__name__} for sample {sample.index};"
            " expected a Sample or a non-empty list of Samples"
        )
