"""The environment of a sample, with a name and a deadline for every call, for plain and async methods.

    open -> reset | restore -> step, snapshot ... -> score -> close

Generators hold one session per sample. A call that exceeds `--environment-step-timeout` raises EnvironmentTimeoutError.
An error of the environment is raised as PluginError with its place in the code. After either error the environment is
not called again: `close` abandons it in its place (`places.py`). `close` never raises, so that a finished sample stays
finished; it returns the error.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from slime_core.errors import ConfigError, EnvironmentTimeoutError, PluginError, SlimeError
from slime_core.plugins.registry import Resolved
from slime_core.plugins.resolve import absolute_spec, resolve
from slime_core.plugins.signatures import declared, is_async, positional_names, unbound
from slime_core.protocols import Args, Reward
from slime_core.protocols.environment import Observation, Step, Turn
from slime_core.sample import Sample, is_score
from slime_core.waits import loop_turn, within
from slime_core.workers.call import raised_at
from slime_environments.session.places import LoopPlace, Place, ProcessPlace, ThreadPlace

logger = logging.getLogger(__name__)

T = TypeVar("T")
THEN = "the environment is given up"
_EXECUTION = ("loop", "thread", "process")


def environment_spec(args: Args, sample: Sample) -> str:
    """Return the spec of a sample's environment: its metadata's `environment_path`, else `--environment-path`.

    Raises:
        ConfigError: Neither is set.
    """
    spec = sample.metadata.get("environment_path") or args.environment_path
    if not spec:
        raise ConfigError(
            f"sample {sample.index} has no environment: set --environment-path NAME (`slime plugins list environments`"
            " shows the names), or environment_path in the row's metadata"
        )
    return absolute_spec(str(spec))


def can_resume(found: Resolved) -> bool:
    """Return True if the environment can save and restore its state."""
    return all(callable(getattr(found.obj, name, None)) for name in ("snapshot", "restore"))


class EnvironmentSession:
    """The session of one sample (see the module); create it by `open`."""

    def __init__(self, found: Resolved, place: Place, name: str, step_timeout: float) -> None:
        self.label = found.ref.label
        """Name in messages, such as `environment 'guess' (...)`."""
        self.resumable = can_resume(found)
        self.scores = callable(getattr(found.obj, "score", None))
        """True if the environment scores the trajectory itself."""
        self._closes = hasattr(found.obj, "close")
        self._takes_turn = bool(declared(found.obj.step, ("turn",)))
        reset = unbound(found.obj, "reset") if isinstance(found.obj, type) else found.obj.reset
        names = positional_names(inspect.signature(reset))
        self._reset_takes = bool(names) and names[0] != "seed", bool(declared(reset, ("seed",)))
        self.state: str | None = None
        """Id of the environment's state after the last call, if it gave one."""
        self._place, self._name, self._step_timeout = place, name, step_timeout
        self._broken = self._closed = False
        self._steps = 0

    @classmethod
    async def open(cls, args: Args, sample: Sample) -> EnvironmentSession:
        """Construct the environment of a sample, without a reset.

        Raises:
            ConfigError: No environment is named.
            PluginError: The environment cannot be found, loaded or constructed.
            EnvironmentTimeoutError: The constructor took too long.
        """
        spec = environment_spec(args, sample)
        found = _resolved(spec)
        timeout = args.environment_step_timeout
        session = cls(found, _place(found, args, spec), f"sample {sample.index}", timeout)
        try:
            await session._bounded(session._place.build(), "its constructor")
        except BaseException:
            await session.close()
            raise
        return session

    async def reset(self, sample: Sample) -> Observation | None:
        """Begin an episode; return the first observation. Raises PluginError, EnvironmentTimeoutError.

        The observation is text or messages, or None.
        """
        takes_sample, takes_seed = self._reset_takes
        seed = {"seed": sample.group_index or 0} if takes_seed else {}
        answer = await self._call("reset", "reset", *([sample] if takes_sample else []), **seed)
        if isinstance(answer, tuple) and len(answer) == 2 and not isinstance(answer[0], Mapping):
            answer, _ = answer
        if isinstance(answer, Step):
            self.state, answer = answer.state, answer.observation
        return _checked_observation(answer, f"{self.label}: reset", none=True)

    async def restore(self, sample: Sample, state: Any, steps: int) -> None:
        """Begin in a state that `snapshot` returned after `steps` steps. Raises as `reset`."""
        await self._call("restore", "restore", sample, state)
        self._steps = steps

    async def step(self, action: str, turn: Turn) -> Step:
        """Execute an action. Raises as `reset`."""
        keywords = {"turn": turn} if self._takes_turn else {}
        self._steps += 1
        answer = await self._call("step", f"step {self._steps}", action, **keywords)
        step = _checked_step(answer, f"{self.label}: step")
        self.state = step.state
        return step

    async def snapshot(self) -> Any:
        """Return the environment's state as JSON values, or None if it has no snapshot. Raises as `reset`."""
        if not self.resumable:
            return None
        state = await self._call("snapshot", "snapshot")
        return _plain(state, f"{self.label}: snapshot")

    async def score(self, sample: Sample) -> Reward:
        """Return the environment's reward of the trajectory; the rollout checks it. Raises as `reset`."""
        reward: Reward = await self._call("score", "score", sample)
        return reward

    async def limited(self, playing: Awaitable[T], seconds: float | None) -> T:
        """Await the whole episode `playing`, with a deadline. Raises EnvironmentTimeoutError when it passes."""
        return await within(
            playing, f"{self.label}: the episode of {self._name}", deadline=seconds, then=THEN,
            error=EnvironmentTimeoutError,
        )  # fmt: skip

    async def close(self) -> str | None:
        """Close the environment after any end of the episode; return an error text or None. Safe to call twice."""
        if self._closed:
            return None
        self._closed = True
        if self._broken:
            self._place.abandon()
            return None
        try:
            if self._closes:
                await self._call("close", "close")
        except (EnvironmentTimeoutError, PluginError) as error:
            logger.warning("%s: %s", self._name, error)
            self._place.abandon()
            return str(error)
        except BaseException:
            self._place.abandon()
            raise
        await self._place.end()
        return None

    async def _call(self, method: str, what: str, *args: Any, **keywords: Any) -> Any:
        if self._broken:
            raise PluginError(f"{self.label}: {what} after a call that failed")
        return await self._bounded(self._place.call(method, *args, **keywords), what)

    async def _bounded(self, call: Any, what: str) -> Any:
        """Await a call with the deadline; after an error the environment is only closed."""
        name = f"{self.label}: {what} for {self._name}"
        try:
            answer = await within(
                call, name, deadline=self._step_timeout, then=THEN,
                error=lambda told: EnvironmentTimeoutError(f"{told} (--environment-step-timeout)"),
            )  # fmt: skip
            await loop_turn()
            return answer
        except SlimeError:
            self._broken = True
            raise
        except Exception as error:
            self._broken = what != "close" and not what.startswith("step")
            raise PluginError(
                f"{self.label}: {what} raised {type(error).__name__}: {error} (at {raised_at(error)})"
            ) from error
        except BaseException:
            self._broken = True
            raise


@functools.lru_cache(maxsize=256)
def _resolved(spec: str) -> Resolved:
    return resolve("environments", spec)


def _place(found: Resolved, args: Args, spec: str) -> Place:
    """Return the place of the class attribute `execution`; by default, the event loop if async, else a thread.

    Raises:
        PluginError: `execution` has another value, or "loop" for plain methods.
    """
    all_async = is_async(found.obj.step) and is_async(found.obj.reset)
    execution = getattr(found.obj, "execution", "loop" if all_async else "thread")
    if execution not in _EXECUTION or (execution == "loop" and not all_async):
        raise PluginError(
            f"{found.ref.label}: execution = {execution!r}; one of 'thread', 'process', and for an environment whose"
            " reset and step are `async def`, 'loop'"
        )
    if execution == "process":
        return ProcessPlace(found, args, spec)
    return LoopPlace(found, args) if execution == "loop" else ThreadPlace(found, args)


def _checked_observation(value: Any, where: str, *, none: bool = False) -> Observation | None:
    if isinstance(value, str) or (none and value is None):
        return value
    if isinstance(value, list | tuple) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value
    ):
        return [dict(message) for message in value]
    raise PluginError(f"{where} returned {value!r:.80}; expected text or chat messages{' or None' if none else ''}")


def _checked_step(value: Any, where: str) -> Step:
    if isinstance(value, tuple) and 3 <= len(value) <= 5:
        seen, paid, *ends = value
        info = ends.pop() if len(value) > 3 else {}
        value = Step(seen, paid, any(ends), info)
    if not isinstance(value, Step):
        raise PluginError(
            f"{where} returned {type(value).__name__}; expected slime_core.Step, or (observation, reward, done)"
        )
    observation = _checked_observation(value.observation, f"{where}: observation")
    reward: Any = value.reward
    named: Mapping[str, Any] = reward if isinstance(reward, Mapping) else value.components
    parts = {str(name): _number(part, f"{where}: reward {name!r}") for name, part in named.items()}
    total = math.fsum(parts.values()) if isinstance(reward, Mapping) else _number(reward, f"{where}: reward")
    info = _plain(dict(value.info), f"{where}: info")
    return Step(
        observation or "", total, bool(value.done), info, parts, None if value.state is None else str(value.state)
    )


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__") or not is_score(float(value)):
        raise PluginError(f"{where} {value!r:.80}; expected a finite number")
    return float(value)


def _plain(value: Any, where: str) -> Any:
    """Return a copy with JSON types, since the value is saved in checkpoints with the sample."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{where} is nothing that JSON can hold: {error}") from error
