"""One way to call rewards and one way to call generate functions, whatever form their authors chose.

The pipeline holds a `RewardCaller` and a `GenerateCaller`; deadlines, concurrency and failed samples are the
pipeline's. What a reader would get wrong: keywords are passed only to functions that declare them by name;
`**kwargs` alone declares nothing, as in THUDM/slime.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.resolve import Resolved
from slime_core.plugins.signatures import (
    construct,
    declared,
    is_async,
    is_batch_reward,
    positional_names,
    signature_of,
)
from slime_core.plugins.thread_pool import AbandonableThreadPool
from slime_core.protocols import Args, GenerateContext, Reward
from slime_core.types import Sample

logger = logging.getLogger(__name__)

_THREADS = AbandonableThreadPool(min(32, (os.cpu_count() or 1) + 4), "slime-reward")
"""Shared by all rewards of the process."""

_READERS_OF_MAPPINGS = ("eval_reward_key", "custom_reward_post_process_path")
"""Settings, besides `reward_key`, under which a mapping is an answer somebody can read."""


class RewardCaller:
    """Any accepted reward as `await score(samples)`.

    Accepted: `(args, sample)`, `(args, samples)`, a class or instance with `compute_reward(prompts, responses)`, and
    a class or instance with one of the first two as `__call__`; each plain or `async`. Plain functions run in a
    thread pool, so that they do not hold up the event loop.
    """

    def __init__(
        self,
        reward: Resolved,
        args: Args,
        *,
        executor: Executor | None = None,
        inline: bool = False,
        group: bool = False,
    ) -> None:
        """Args are constant over the caller's life.

        Args:
            reward: What `resolve("rewards", ...)` returned.
            args: The run's settings, passed to the reward.
            executor: Pool for plain functions; None is one whose threads are given up when a score is cancelled, so
                that a reward which never returns holds up neither the others nor the end of the process.
            inline: Call plain functions on the event loop's thread, for reproducible order.
            group: Call a function with the list of samples whatever its parameter is called (`--group-rm`).
        """
        obj = construct(reward.obj, args) if inspect.isclass(reward.obj) else reward.obj
        self.label = reward.ref.label
        self.args = args
        self._executor = executor
        self._inline = inline
        self._scores_texts = callable(getattr(obj, "compute_reward", None))
        self._function: Callable[..., Any] = obj.compute_reward if self._scores_texts else obj
        self.batched: bool = group or self._scores_texts or is_batch_reward(self._function)
        """True: one call scores a list. False: the pipeline may score every sample as soon as it is generated."""
        self.scores_groups: bool = group or bool(getattr(obj, "scores_groups", False))
        """True: the list must be the whole group, since scores depend on each other."""
        self._is_async = is_async(self._function)
        self._keywords = declared(self._function, ("evaluation",))
        if group and not self._scores_texts and _takes_one_sample(self._function):
            logger.warning("%s: --group-rm passes a list of samples as 'sample'", self.label)

    async def score(self, samples: Sequence[Sample], evaluation: bool = False) -> list[Reward]:
        """One reward per sample, in order; a reward that scores one at a time is called for each in turn.

        Raises:
            PluginError: The reward returned something else than a finite number or a mapping (with --reward-key or
                a reward post-process function to read it), or a list of another length; or it raised what no task
                may raise (SystemExit, StopIteration, a cancellation of its own).
            Exception: Whatever the reward raised.
        """
        keywords = {"evaluation": evaluation} if "evaluation" in self._keywords else {}
        if not self.batched:
            return [self._checked(await self._call(self.args, s, **keywords), s) for s in samples]
        if self._scores_texts:
            prompts, responses = [s.prompt for s in samples], [s.response for s in samples]
            values = await self._call(prompts, responses, **keywords)
        else:
            values = await self._call(self.args, list(samples), **keywords)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(samples):
            size = f" of {len(values)}" if isinstance(values, Sequence) else ""
            raise PluginError(
                f"{self.label} returned {type(values).__name__}{size}; expected a list of {len(samples)} rewards"
            )
        return [self._checked(value, sample) for value, sample in zip(values, samples)]

    async def _call(self, *args: Any, **keywords: Any) -> Any:
        call = functools.partial(_contained, self.label, functools.partial(self._function, *args, **keywords))
        if self._is_async or self._inline:
            value = call()
        elif self._executor is not None:
            value = await asyncio.get_running_loop().run_in_executor(self._executor, call)
        else:
            value = await _on_a_thread(call)
        return await _awaited(self.label, value) if inspect.isawaitable(value) else value

    def _checked(self, value: Any, sample: Sample) -> Reward:
        """The value as a float or a mapping; PluginError naming the sample otherwise."""
        if isinstance(value, Mapping):
            key = getattr(self.args, "reward_key", None)
            if key and key not in value:
                raise PluginError(
                    f"{self.label} returned keys {', '.join(map(repr, value))} for sample {sample.index};"
                    f" --reward-key asks for {key!r}"
                )
            if key:
                self._number(value[key], sample)
            elif not any(getattr(self.args, name, None) for name in _READERS_OF_MAPPINGS):
                raise PluginError(
                    f"{self.label} returned a mapping with keys {', '.join(map(repr, value)) or 'none'} for sample"
                    f" {sample.index}; say which of them is the reward: --reward-key KEY"
                )
            return dict(value)
        return self._number(value, sample)

    def _number(self, value: Any, sample: Sample) -> float:
        if hasattr(value, "item") and getattr(value, "size", None) is not None:
            value = value.item()  # a numpy or torch scalar
        if not isinstance(value, (int, float)):
            raise PluginError(
                f"{self.label} returned {type(value).__name__} for sample {sample.index};"
                " expected a number or a mapping of numbers"
            )
        if not math.isfinite(value):
            raise PluginError(f"{self.label} returned {value} for sample {sample.index}; expected a finite number")
        return float(value)


def _takes_one_sample(function: Callable[..., Any]) -> bool:
    """Whether the second positional parameter is called `sample`."""
    signature = signature_of(function)
    return signature is not None and positional_names(signature)[1:2] == ["sample"]


def _contained(label: str, call: Callable[[], Any]) -> Any:
    """Call; what would end the process, the event loop or a generator becomes the plugin's error."""
    try:
        return call()
    except StopIteration as error:  # no future can hold one: whoever awaited it would wait for ever
        raise _escaped(label, error) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _escaped(label, error) from error


async def _awaited(label: str, value: Awaitable[Any]) -> Any:
    """`_contained` for the asynchronous part; a cancellation of the waiting task passes."""
    try:
        return await value
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _escaped(label, error) from error


def _escaped(label: str, error: BaseException) -> PluginError:
    return PluginError(f"{label} raised {type(error).__name__}{f'({error})' if str(error) else ''}")


async def _on_a_thread(call: Callable[[], Any]) -> Any:
    future = _THREADS.submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        _THREADS.abandon(future)
        raise


class GenerateCaller:
    """Any accepted generate function as `await call(...)`."""

    def __init__(self, generator: Resolved) -> None:
        self.label = generator.ref.label
        self._function: Callable[..., Any] = generator.obj
        self._keywords = declared(self._function, ("evaluation", "context"))
        self.takes_context = "context" in self._keywords
        """False: the function reaches the engine, if at all, through `args.sglang_router_ip` and `_port`."""

    async def call(
        self,
        args: Args,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        evaluation: bool = False,
        context: GenerateContext | None = None,
    ) -> Sample | list[Sample]:
        """Generate; the function gets its own copy of `sampling_params`.

        Raises:
            PluginError: The function returned something else than a sample or a non-empty list of samples.
            Exception: Whatever the function raised.
        """
        offered = {"evaluation": evaluation, "context": context}
        keywords = {name: offered[name] for name in self._keywords}
        call = functools.partial(self._function, args, sample, dict(sampling_params), **keywords)
        result = _contained(self.label, call)
        if inspect.isawaitable(result):
            result = await _awaited(self.label, result)
        if isinstance(result, Sample):
            return result
        if isinstance(result, list) and result and all(isinstance(item, Sample) for item in result):
            return result
        raise PluginError(
            f"{self.label} returned {type(result).__name__} for sample {sample.index};"
            " expected a Sample or a non-empty list of Samples"
        )
