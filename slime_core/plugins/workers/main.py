"""What a worker process of rewards runs: read a call, score, write the answer, until the other side is gone.

`workers.pool` starts it as a fresh interpreter and talks to it over one socket, so that prints of user code disturb
nothing. Components are resolved here from their specs; only settings, samples and answers travel. What a reader
would get wrong: the process leads its own session, so it never sees the terminal's ctrl-C; it ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import random
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.adapters import RewardCaller
from slime_core.plugins.resolve import resolve
from slime_core.plugins.workers.calls import HEADER, WorkerArgs, changes, restore, send, unpack_args, update_args

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve calls that come over the socket `descriptor` until it closes or process `parent` is gone."""
    tie_to(parent)
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker()
    while True:
        message = read_message(sock)
        if message is None:
            os._exit(0)  # without the exit handlers of user code, which may hang
        send(sock, worker.answer(message))


class _Worker:
    """The components of one process and the event loop for those that await."""

    def __init__(self) -> None:
        self._args: Any = None
        self._callers: dict[str, RewardCaller] = {}
        self._own: list[tuple[WorkerArgs, Any]] = []
        """Settings of components with plugin options of their own, and these."""
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def answer(self, message: bytes) -> bytes:
        """The pickled ("ok", ...) or ("error", kind, text, traceback) to a pickled request."""
        try:
            request = pickle.loads(message)
            answer = ("ok", *getattr(self, request[0])(*request[1:]))
            return pickle.dumps(answer)
        except BaseException as error:
            return pickle.dumps(("error", type(error).__name__, str(error), _users_traceback(error)))

    def start(self, args: bytes, memory_limit: float | None) -> tuple[()]:
        """Take the run's settings."""
        if memory_limit is not None:
            limit = int(memory_limit * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        self._args = unpack_args(args)
        return ()

    def update(self, changed: bytes) -> tuple[()]:
        """Take settings that were set since."""
        update_args(self._args, changed)
        for args, options in self._own:
            update_args(args, changed)
            args.plugins = options
        return ()

    def load(self, key: str, spec: str, group: bool, options: bytes) -> tuple[()]:
        """Resolve a component and build it; `options` as `calls.Component` has them."""
        args = self._args
        if options:
            args = WorkerArgs(**{**vars(args), "_packed": dict(args._packed), "plugins": pickle.loads(options)})
            self._own.append((args, args.plugins))
        self._callers[key] = RewardCaller(resolve("rewards", spec), args, inline=True, group=group)
        return ()

    def score(self, key: str, states: bytes, evaluation: bool, seed: int) -> tuple[list[Any], list[dict[str, Any]]]:
        """Rewards, and for each sample what the reward changed in it."""
        samples = [restore(state) for state in pickle.loads(states)]
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        rewards = self._loop.run_until_complete(self._callers[key].score(samples, evaluation))
        try:
            return rewards, [changes(before, sample) for before, sample in zip(pickle.loads(states), samples)]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PluginError(
                f"what {self._callers[key].label} wrote to its sample cannot be sent back to the run ({error});"
                " keep plain data in sample.metadata, or declare RewardTraits(execution='thread') on the reward"
            ) from error


def read_message(sock: socket.socket) -> bytes | None:
    """The next message; None when there will be none."""
    header = _exactly(sock, HEADER.size)
    return None if header is None else _exactly(sock, HEADER.unpack(header)[0])


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(size - len(data), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


def tie_to(parent: int) -> None:
    """End with the parent however it ends, and be the kernel's first choice when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _users_traceback(error: BaseException) -> str:
    """The traceback without slime's frames at its head."""
    cause = error.__cause__ if isinstance(error, PluginError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(cause.__traceback__)
    own = str(Path(__file__).resolve().parents[1])  # slime_core/plugins
    while frames and os.path.abspath(frames[0].filename).startswith(own + os.sep):
        frames.pop(0)
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(cause)])
