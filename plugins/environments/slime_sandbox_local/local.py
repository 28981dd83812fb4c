"""`LocalSandbox`: a sandbox of namespaces on this machine, driven over the keeper's socket.

::

    exec / write_file / read_file --> request, numbered --> first process of the sandbox
                                 <-- answer, by number <-- (one reader task per sandbox)

Requests of a sandbox run concurrently and share its limits.

Await blocking calls without the event loop's own few threads.

`local.py` starts and ends sandboxes with `on_thread`. asyncio's default pool has only as many threads as processors
plus four, and shares them with other blocking calls (files, retrievers), so sandboxes of hundreds of samples would wait
there while their deadlines run. A thread of `on_thread` ends with its call and is never joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from slime_core.waits import waiting, within
from slime_sandbox_local.inside import messages
from slime_sandbox_local.isolation import check_isolation, require_isolation
from slime_sandbox_local.keeper import START_SECONDS, Keeper, start_keeper
from slime_sandbox_local.protocol import TIMED_OUT, ExecResult, SandboxError, SandboxLimits

_GRACE = 15.0
"""Seconds after a job's own timeout within which its answer must arrive."""
_FILE_SECONDS = 60.0


class LocalSandbox:
    """See `protocol.Sandbox`. Working directory and home are `work`, private, in memory, and gone at the end.

    Inside: the system's programs and libraries and this Python's installation, read only; no other file of the host; a
    user without rights; no network but `limits.endpoints`. `docs/how-to/sandbox.md` has the whole list.

    Args:
        limits: Limits on the resources of programs.
        env: Variables of every command, added to a few that programs need; this process's variables are not passed on.
        isolation: `require`: refuse to start if a feature above is missing; `best-effort`: start without it, but refuse
            if programs could act as slime's user; `none`: start in that case, too.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, env: Mapping[str, str] | None = None, isolation: str = "require"
    ) -> None:
        self.limits = limits or SandboxLimits()
        if self.limits.network and self.limits.endpoints:
            raise SandboxError("limits.endpoints is for a sandbox without network; with limits.network it has no use")
        self.env = dict(env or {})
        self.isolation = check_isolation(isolation)
        self._keeper: Keeper | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers = itertools.count()
        self._gone: str | None = "it has not been entered (`async with`)"

    @property
    def work(self) -> str:
        """Working directory, as programs see it."""
        return self._entered().work

    @property
    def missing(self) -> dict[str, str]:
        """Missing isolation feature -> reason; empty if `isolation` is `require`."""
        return self._entered().missing

    def _entered(self) -> Keeper:
        if self._keeper is None:
            raise SandboxError(f"the sandbox cannot be used: {self._gone}")
        return self._keeper

    async def __aenter__(self) -> Self:
        if self._keeper is not None:
            raise SandboxError("the sandbox has been entered before; make another one")
        start = await on_thread("the start of a sandbox", self._start, Keeper.ask_to_end)
        try:
            keeper = await within(
                asyncio.shield(start), "the start of a sandbox", deadline=START_SECONDS, then="it is given up",
                error=SandboxError,
            )  # fmt: skip
        except BaseException:
            start.add_done_callback(_end_late)
            raise
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=keeper.control)
        except BaseException:
            keeper.ask_to_end()
            raise
        self._keeper, self._gone = keeper, None
        self._reader_task = asyncio.create_task(self._read(reader), name="slime sandbox")
        return self

    def _start(self) -> Keeper:
        require_isolation(self.isolation)
        keeper = start_keeper(self.limits, self.env)
        keeper.control.setblocking(False)
        return keeper

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every process in the sandbox; safe to call twice. If cancelled, kill without waiting."""
        keeper, writer, reader = self._keeper, self._writer, self._reader_task
        self._lose("it has been closed")
        self._keeper = None
        if keeper is None or writer is None or reader is None:
            return
        try:
            reader.cancel()
            writer.transport.abort()
            end = await on_thread("the end of a sandbox", keeper.process.stop, lambda _: None)
            await within(
                asyncio.shield(end), "the end of a sandbox", deadline=2 * START_SECONDS, then="it is left to its guard",
                error=SandboxError,
            )  # fmt: skip
        except BaseException:
            keeper.ask_to_end()
            raise

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float,
        check: bool = False,
        idempotent: bool = False,
    ) -> ExecResult:
        """See `Sandbox.exec`. `user` must be "sandbox", the only user, who has no rights, or None for the same."""
        if user not in (None, "sandbox"):
            raise SandboxError(f"user {user!r}: a local sandbox has one user, 'sandbox'; leave `user` away")
        command = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        answer, body = await self.request(
            {"op": "exec", "command": command, "env": dict(env or {})}, timeout=timeout,
            what=f"a command in a sandbox ({command[-1]:.60})",
        )  # fmt: skip
        result = result_of(answer, body)
        if check and result.code != 0:
            how = f"did not end within {timeout:g} s" if result.code == TIMED_OUT else f"ended with {result.code}"
            raise SandboxError(f"{cmd!r:.200} {how}: {result.err[-2000:] or result.out[-2000:]}")
        return result

    async def write_file(self, path: str, data: str | bytes | Path) -> None:
        """See `Sandbox.write_file`. The file is written as the sandbox's user; `path` is relative to `work`."""
        if isinstance(data, Path):
            data = await asyncio.to_thread(data.read_bytes)
        body = data.encode() if isinstance(data, str) else data
        answer, out = await self.request(
            {"op": "write", "path": path}, what=f"writing {path} in a sandbox", timeout=_FILE_SECONDS, body=body
        )
        self._check_file("write", path, result_of(answer, out))

    async def read_file(self, path: str) -> bytes:
        """See `Sandbox.read_file`. The file may have at most `limits.file_mb`."""
        answer, body = await self.request(
            {"op": "read", "path": path}, what=f"reading {path} in a sandbox", timeout=_FILE_SECONDS
        )
        if "out" in answer.get("cut", ()):
            raise SandboxError(f"cannot read {path} in the sandbox: it is larger than {self.limits.file_mb} MB")
        self._check_file("read", path, result_of(answer, body))
        return body[: answer["out"]]

    def _check_file(self, verb: str, path: str, result: ExecResult) -> None:
        if result.code != 0:
            reason = f"not done within {_FILE_SECONDS:g} s" if result.timed_out else result.err.strip()
            raise SandboxError(f"cannot {verb} {path} in the sandbox: {reason or f'status {result.code}'}")

    # -- requests and answers ----------------------------------------------------------------------------------------

    async def request(
        self, message: dict[str, Any], *, what: str, timeout: float, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to `inside/jobs.py` and return its answer. Raises SandboxError if the sandbox is gone."""
        if self._gone is not None or self._writer is None:
            raise SandboxError(f"the sandbox cannot be used: {self._gone}")
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(messages.pack({**message, "id": number, "timeout": timeout}, body))
            return await within(
                answer, what, deadline=timeout + _GRACE, then="the sandbox counts as gone", error=SandboxError
            )
        except SandboxError:
            self._lose("its first process does not answer")
            raise
        finally:
            self._answers.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver answers to the waiting requests until the sandbox is gone."""
        buffer = bytearray()
        most = (self.limits.file_mb << 20) + (self.limits.output_kb << 11) + (1 << 20)
        try:
            while part := await reader.read(1 << 18):
                buffer += part
                while (message := messages.take(buffer, most)) is not None:
                    waiter = self._answers.get(message[0]["id"])
                    if waiter is not None and not waiter.done():
                        waiter.set_result(message)
            self._lose("it has ended")
        except (OSError, ValueError) as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """Mark the sandbox as gone, and fail all waiting requests."""
        self._gone = self._gone or reason
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(SandboxError(f"the sandbox is gone: {reason}"))


def result_of(answer: Mapping[str, Any], body: bytes) -> ExecResult:
    """Convert a job's answer to its result."""
    split = answer["out"]
    out, err = (part.decode("utf-8", "replace") for part in (body[:split], body[split:]))
    for name in answer.get("cut", ()):
        if name == "out":
            out += "\n[cut: more output than the sandbox keeps]"
        else:
            err += "\n[cut: more output than the sandbox keeps]"
    said = [part for part in (err, answer.get("note", ""), answer.get("error", "")) if part]
    return ExecResult(answer["code"], out, "\n".join(said))


def _end_late(start: asyncio.Future[Keeper]) -> None:
    """End a sandbox that started after its caller had given up."""
    if not start.cancelled() and start.exception() is None:
        start.result().ask_to_end()


T = TypeVar("T")

STARTS = max(4, 2 * (os.cpu_count() or 1))
"""Maximum number of concurrent calls in an event loop: starting a process uses a processor."""
_places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def on_thread(what: str, call: Callable[[], T], unwanted: Callable[[T], None]) -> asyncio.Future[T]:
    """Wait for a place, and start the call in a new daemon thread; the caller enforces a deadline.

    Args:
        what: Name of the call for the list of waits.
        call: Function that blocks for a while, and ends by itself.
        unwanted: Function that disposes of a result that arrives after the event loop is closed.
    """
    loop = asyncio.get_running_loop()
    place = _places.setdefault(loop, asyncio.Semaphore(STARTS))
    with waiting(f"a turn for {what}", deadline=None, then="those before it have deadlines"):
        await place.acquire()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda _: place.release())

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(future.set_exception, problem)
            return
        try:
            loop.call_soon_threadsafe(future.set_result, result)
        except RuntimeError:
            unwanted(result)

    threading.Thread(target=run, name=f"slime: {what}", daemon=True).start()
    return future
