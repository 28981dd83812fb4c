"""Main loop of a reward worker process: read a call, score, write the answer (`slime_rewards.processes.worker`).

The worker resolves components from their specs; only settings, samples and answers are sent between processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import random
import resource
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import slime_core
from slime_core.errors import PluginError
from slime_core.plugins.adapters import RewardCaller
from slime_core.plugins.resolve import resolve
from slime_rewards.processes.messages import WorkerArgs, changes, restore, sample_state, unpack_args
from slime_rewards.processes.worker import serve


def main(descriptor: int) -> None:
    """Serve calls from the socket `descriptor`."""
    serve(descriptor, _Worker().answer)


class _Worker:
    """The components of one process, and the event loop for asynchronous components."""

    def __init__(self) -> None:
        self._packed = b""
        self._args: dict[bytes, WorkerArgs] = {}
        """Packed plugin options of a component -> settings with these options; the run's own under the empty key."""
        self._callers: dict[str, RewardCaller] = {}
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def answer(self, message: bytes) -> bytes:
        """Answer a pickled request: pickled (seconds, "ok", ...) or (seconds, "error", kind, text, traceback)."""
        began = time.perf_counter()
        try:
            request = pickle.loads(message)
            found = getattr(self, request[0])(*request[1:])
            return pickle.dumps((time.perf_counter() - began, "ok", *found))
        except BaseException as error:
            problem = type(error).__name__, str(error), _users_traceback(error)
            return pickle.dumps((time.perf_counter() - began, "error", *problem))

    def update(self, args: bytes, memory_limit: float | None) -> tuple[()]:
        """Set the run's settings, in place in those that components hold."""
        if memory_limit is not None:
            limit = int(memory_limit * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        self._packed = args
        for options in self._args:
            self._settings(options)
        return ()

    def load(self, key: str, spec: str, group: bool, options: bytes) -> tuple[()]:
        """Resolve a component and build it; `options` has the form of `adapters.Component`."""
        args = self._settings(options)
        self._callers[key] = RewardCaller(resolve("rewards", spec), args, inline=True, group=group)
        return ()

    def _settings(self, options: bytes) -> Any:
        """Return the settings of components with these plugin options, with the newest values."""
        args = self._args.setdefault(options, WorkerArgs())
        unpack_args(self._packed, args)
        if options:
            args.plugins = pickle.loads(options)
        return args

    def score(self, key: str, states: bytes, evaluation: bool, seed: int) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return the rewards, and the changes to each sample that the reward changed."""
        samples = [restore(state) for state in pickle.loads(states)]
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        rewards = contextvars.copy_context().run(self._finished, self._callers[key].score(samples, evaluation))
        try:
            changed: list[dict[str, Any]] = []
            if pickle.dumps([sample_state(sample) for sample in samples]) != states:
                changed = [changes(before, sample) for before, sample in zip(pickle.loads(states), samples)]
            return rewards, changed
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PluginError(
                f"what {self._callers[key].label} wrote to its sample cannot be sent back to the run ({error});"
                " keep plain data in sample.metadata, or declare RewardTraits(execution='thread') on the reward"
            ) from error

    def _finished(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the coroutine's result; run the event loop, which costs more than most rewards, only if it awaits."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        return self._loop.run_until_complete(coroutine)


def _users_traceback(error: BaseException) -> str:
    """Return the traceback without slime's frames at its head."""
    cause = error.__cause__ if isinstance(error, PluginError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(cause.__traceback__)
    own = tuple(f"{Path(file).resolve().parent}{os.sep}" for file in (slime_core.__file__, __file__))
    while frames and os.path.abspath(frames[0].filename).startswith(own):
        frames.pop(0)
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(cause)])
