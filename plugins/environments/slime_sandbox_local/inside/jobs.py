"""The sandbox's first process: it takes requests from outside, runs each as a job, and answers when the job has ended.

::

    socket --request--> Server --fork--> job (confined)        exec: a command          open: a resident command
           <--answer---        <--pipes--                      write, read: a file      call: a line for a resident one

`main.py` calls `Server(...).serve()`, which returns when the caller is gone. The server is process 1 of its namespace,
so its end ends all other processes. A job is over when its process has ended, even if a process that it left behind
still holds its output; further output of such a process is lost.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from slime_core.workers.guard import descendants
from slime_sandbox_local.inside import disk, kernel, messages, processes
from slime_sandbox_local.inside.forward import hand_over
from slime_sandbox_local.inside.rights import Confinement, confine

TIMED_OUT = -1
_LOOK_BUSY, _LOOK_IDLE = 0.1, 1.0
"""Seconds between checks of memory."""
_MARK = 3
"""Descriptor on which a resident process writes a line when a call is done."""
_LONGEST_MARK = 65_536


class Job:
    """A started process, and the request that waits for it."""

    def __init__(
        self, request: int, pid: int, given: bytes, pipes: dict[str, int], until: float, most: int, whole: bool
    ) -> None:
        self.request: int | None = request
        self.pid = pid
        self.given = memoryview(given)
        self.pipes = pipes
        """Parent's ends of the pipes: `in`, `out`, `err`, and `mark` for a resident process."""
        self.until = until
        self.most = most
        self.whole = whole
        """Whether the process ends if its output exceeds `most`, since a longer output is useless to the caller."""
        self.kept = {"out": bytearray(), "err": bytearray(), "mark": bytearray()}
        self.status: int | None = None
        self.note = ""
        self.timed_out = False

    @property
    def stays(self) -> bool:
        """Whether the process is resident and answers calls until it ends."""
        return "mark" in self.pipes


class Server:
    """The sandbox's first process: its requests, jobs and limits.

    Args:
        control: Socket to the caller.
        confinement: Confinement of programs.
        environment: Environment variables of programs.
        work: Working directory of programs.
        strewing: User whose files outside the working directory also count (`disk.strewn`).
    """

    def __init__(
        self, control: socket.socket, confinement: Confinement, environment: dict[str, str], work: str,
        strewing: int | None = None,
    ) -> None:  # fmt: skip
        self.control, self.confinement, self.environment, self.work = control, confinement, environment, work
        self.limits, self.strewing = confinement.limits, strewing
        self.selector = selectors.DefaultSelector()
        self.jobs: dict[int, Job] = {}
        """Jobs by process id."""
        self.received, self.to_send = bytearray(), bytearray()
        self.alive = True
        self.look_at = 0.0
        self.seen: list[int] = []
        """Processes found by the last check."""
        self.look_at_disk = 0.0 if confinement.writable else float("inf")

    def serve(self) -> None:
        """Serve requests until the caller is gone."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.control.setblocking(False)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda _: os.read(wake_read, 4096))
        self.selector.register(self.control, selectors.EVENT_READ, self._converse)
        while self.alive:
            for key, events in self.selector.select(self._next()):
                if self.selector.get_map().get(key.fd) is key:  # not closed by one before it
                    key.data(events)
            self._reap()
            self._look()
            self._look_at_disk()

    def serve_ports(self, listeners: list[socket.socket], carrier: socket.socket) -> None:
        """Hand connections to these listeners over to the carrier."""
        carrier.setblocking(False)
        for listener in listeners:
            self.selector.register(listener, selectors.EVENT_READ, lambda _, one=listener: hand_over(one, carrier))

    def _next(self) -> float:
        """Return the seconds until the next deadline or check."""
        times = [min(self.look_at, self.look_at_disk) if self.jobs else float("inf")]
        times += [job.until for job in self.jobs.values() if job.request is not None]
        return max(0.0, min(*times, time.monotonic() + 60.0) - time.monotonic())

    # -- the caller --------------------------------------------------------------------------------------------------

    def _converse(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                part = self.control.recv(1 << 18)
                if not part:
                    self.alive = False
                    return
                self.received += part
                while self.alive and (message := messages.take(self.received)):
                    self._begin(*message)
            if events & selectors.EVENT_WRITE and self.to_send:
                del self.to_send[: self.control.send(self.to_send)]
                self._watch_control()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self.alive = False

    def _answer(self, request: int, body: bytes = b"", **fields: Any) -> None:
        self.to_send += messages.pack({"id": request, **fields}, body)
        self._watch_control()

    def _watch_control(self) -> None:
        write = selectors.EVENT_WRITE if self.to_send else 0
        self.selector.modify(self.control, selectors.EVENT_READ | write, self._converse)

    def _begin(self, message: dict[str, Any], body: bytes) -> None:
        kind, request = message["op"], message["id"]
        until = time.monotonic() + message.get("timeout", 60.0)
        if kind == "call":
            self._call(request, message["process"], body, until)
            return
        most = self.limits["output_kb"] * 1024
        if kind == "read":
            most = self.limits["file_mb"] << 20
        run = {
            "exec": lambda: self._program(message), "open": lambda: self._program(message),
            "write": lambda: write_file(message["path"]), "read": lambda: read_file(message["path"], most),
        }[kind]  # fmt: skip
        try:
            whole = message.get("whole", False)
            job = self._start(request, run, body, until, most, stays=kind == "open", whole=whole)
        except OSError as error:
            self._answer(request, code=127, out=0, error=f"cannot start a process: {error}")
            return
        if kind == "open":
            job.request = None
            self._answer(request, process=job.pid)

    def _program(self, message: dict[str, Any]) -> None:
        """Become the program, in the forked process."""
        command, environment = message["command"], {**self.environment, **message.get("env", {})}
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)

    def _call(self, request: int, process: int, body: bytes, until: float) -> None:
        job = self.jobs.get(process)
        if job is None or job.request is not None:
            self._answer(request, code=1, out=0, error="no such process" if job is None else "it is in a call")
            return
        job.request, job.until, job.given = request, until, memoryview(body)
        for kept in job.kept.values():
            kept.clear()
        self.selector.register(job.pipes["in"], selectors.EVENT_WRITE, lambda _: self._feed(job))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _start(
        self, request: int, run: Callable[[], None], given: bytes, until: float, most: int, *, stays: bool, whole: bool
    ) -> Job:
        ours: dict[str, int] = {}
        theirs: dict[int, int] = {}
        for name, number in {"in": 0, "out": 1, "err": 2, **({"mark": _MARK} if stays else {})}.items():
            read, write = os.pipe2(os.O_CLOEXEC)
            ours[name], theirs[number] = (write, read) if name == "in" else (read, write)
            os.set_blocking(ours[name], False)
        try:
            pid = os.fork()
        except OSError:
            for descriptor in [*ours.values(), *theirs.values()]:
                os.close(descriptor)
            raise
        if pid == 0:
            become(run, theirs, self.confinement, self.work)
        for descriptor in theirs.values():
            os.close(descriptor)
        job = self.jobs[pid] = Job(request, pid, given, ours, until, most, whole)
        for name in ("out", "err", "mark"):
            if name in ours:
                self.selector.register(ours[name], selectors.EVENT_READ, lambda _, n=name: self._drain(job, n))
        if not stays:
            self.selector.register(ours["in"], selectors.EVENT_WRITE, lambda _: self._feed(job))
        self.look_at = min(self.look_at, time.monotonic() + _LOOK_BUSY)
        return job

    def _feed(self, job: Job) -> None:
        """Write input to a job; a resident process keeps its pipe open."""
        descriptor = job.pipes["in"]
        try:
            job.given = job.given[os.write(descriptor, job.given[:65_536]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            job.given = memoryview(b"")
        if not job.given:
            self.selector.unregister(descriptor)
            if not job.stays:
                os.close(job.pipes.pop("in"))

    def _drain(self, job: Job, name: str) -> bool:
        """Read a job's output and keep as much as fits; return False if no more output is available for now."""
        try:
            part = os.read(job.pipes[name], 1 << 18)
        except BlockingIOError:
            return False
        kept = job.kept[name]
        kept += part[: max(0, (_LONGEST_MARK if name == "mark" else job.most) + 1 - len(kept))]
        if job.whole and name == "out" and len(kept) > job.most:
            processes.end_tree(job.pid)
        if not part:
            self.selector.unregister(job.pipes[name])
            os.close(job.pipes.pop(name)) if name != "mark" else None
            return False
        if name == "mark" and kept.endswith(b"\n") and job.request is not None:
            self._drain_rest(job)
            self._reply(job, code=0, mark=bytes(kept).decode("utf-8", "replace"))
        return True

    def _drain_rest(self, job: Job) -> None:
        """Read the data already in the pipes, at most a pipe's capacity each, as other processes may keep writing."""
        for name in ("out", "err"):
            for _ in range(8):
                if name not in job.pipes or not self._drain(job, name):
                    break

    def _reply(self, job: Job, code: int, **fields: Any) -> None:
        """Answer the request that waits for the job, and discard the job's output."""
        request, job.request = job.request, None
        if request is None:
            return
        out, err = (bytes(job.kept[name][: job.most]) for name in ("out", "err"))
        cut = [name for name in ("out", "err") if len(job.kept[name]) > job.most]
        self._answer(request, out + err, code=code, out=len(out), cut=cut, note=job.note, **fields)
        for kept in job.kept.values():
            kept.clear()

    def _reap(self) -> None:
        """Collect the status of all ended processes, including adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.jobs.pop(pid, None)
            if job is not None:
                self._over(job, os.waitstatus_to_exitcode(status))

    def _over(self, job: Job, status: int) -> None:
        self._drain_rest(job)
        for descriptor in job.pipes.values():
            with contextlib.suppress(KeyError):
                self.selector.unregister(descriptor)
            os.close(descriptor)
        code = TIMED_OUT if job.timed_out else status if status >= 0 else 128 - status
        self._reply(job, code, ended=True)

    def _look(self) -> None:
        """End jobs that exceed their time, and all jobs if together they use too much memory."""
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if job.request is not None and now >= job.until:
                job.timed_out = True
                processes.end_tree(job.pid)
                job.until = now + 5.0
        if now < self.look_at or not self.jobs:
            return
        busy = any(job.request is not None for job in self.jobs.values())
        self.look_at = now + (_LOOK_BUSY if busy else _LOOK_IDLE)
        self.seen = descendants(os.getpid())
        threads, memory = processes.census(self.seen)
        note = f"more than {self.limits['memory_mb']} MB of memory in use" if memory > self.limits["memory_mb"] else ""
        if threads > self.limits["processes"]:  # root of the host, where it cannot become another user
            note = f"more than {self.limits['processes']} processes and threads"
        if note:
            self._end_all(note)

    def _look_at_disk(self) -> None:
        """End all jobs if together they have written too much, and remove their files to make room."""
        if time.monotonic() < self.look_at_disk or not self.jobs:
            return
        before, most = time.process_time(), self.limits["disk_mb"] << 20
        strewn = disk.strewn(self.strewing)
        left = most - disk.written([self.work, *strewn], {*self.seen, *self.jobs}, most)
        if left < 0:
            self._end_all(f"more than {self.limits['disk_mb']} MB on disk; its files are removed")
            disk.remove(self.work, *strewn)
            disk.make(self.work, self.confinement.user)
        took = time.process_time() - before
        self.look_at_disk = time.monotonic() + disk.until_next(max(left, 0), took)

    def _end_all(self, note: str) -> None:
        for job in self.jobs.values():
            job.note = f"killed: {note}"
        processes.end_all()


def become(run: Callable[[], None], descriptors: dict[int, int], confinement: Confinement, work: str) -> None:
    """Set up descriptors and confinement in a forked process, then call `run`. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for name in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(name, signal.SIG_DFL)
        high = {number: os.dup(descriptor) for number, descriptor in descriptors.items()}
        for number, descriptor in high.items():
            os.dup2(descriptor, number)
        kernel.close_from(len(high))
        os.umask(0o022)
        os.chdir(work)
        confine(confinement)
        run()
        code = 0
    except OSError as error:
        os.write(2, f"{error}\n".encode("utf-8", "replace"))
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def write_file(path: str) -> None:
    """Copy standard input to the file, with the rights of the program."""
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644)
    while part := os.read(0, 1 << 18):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(descriptor, rest) :]


def read_file(path: str, most: int) -> None:
    """Copy the file to standard output, with the rights of the program; a byte beyond `most` shows a longer file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    left = most + 1
    while left > 0 and (part := os.read(descriptor, min(left, 1 << 18))):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(1, rest) :]
        left -= len(part)
