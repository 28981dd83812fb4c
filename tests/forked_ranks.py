"""The ranks that a command starts on this machine, as forks too: `install` runs in the fork that becomes the command.

A guard starts an interpreter per rank, which imports for seconds what the process behind `tests.zygote` has imported.
Here a second fork is asked instead, made before the command does anything, so that a rank begins as a fresh process
does::

    zygote -> the command          asks
           \\-> ... -> nursery -> (ends at once) -> guard, a child of the command -> guard -> rank

Runs that are about starting or losing ranks (`tests/integration/test_ranks.py`) start real interpreters; so do those
that drain by a signal to the command, which finds rank 0 by the environment that a process was started with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from typing import Any

from tests import zygote

_PR_SET_CHILD_SUBREAPER = 36
_ADOPTED_S = 60.0
"""For a guard to become a child of the command, on a busy machine."""


def install() -> None:
    """Make the nursery, and have it asked for the guards of ranks."""
    from slime_core.workers import guard
    from slime_core.workers import process as guarded

    guard._prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a child's orphan becomes a child of this process
    command = os.getpid()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            _nursery(theirs, command)
        finally:
            os._exit(0)
    theirs.close()
    real = guarded.popen

    def start(args: list[str], **keywords: Any) -> Any:
        return Forked(ours, args, **keywords) if "slime_core" in args else real(args, **keywords)

    guarded.popen = start  # type: ignore[assignment, misc]


class Forked(subprocess.Popen[bytes]):
    """The guard of a rank as its owner knows it."""

    def __init__(self, nursery: socket.socket, args: list[str], **keywords: Any) -> None:
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = subprocess.threading.Lock()  # type: ignore[attr-defined]
        self._input, self._communication_started, self._child_created = None, False, True
        order = {"argv": args[args.index(guard_file()) + 1 :], "env": keywords["env"], "cwd": os.getcwd()}
        out = keywords["stdout"] if keywords["stdout"] is not None else 1
        err = out if keywords["stderr"] == subprocess.STDOUT else 2
        (control,) = keywords["pass_fds"]
        socket.send_fds(nursery, [json.dumps(order).encode() + b"\n"], [control, out, err])
        with nursery.makefile("rb") as answers:
            self.pid = int(answers.readline())


def guard_file() -> str:
    """The guard's program."""
    from slime_core.workers import guard

    return guard.__file__


def _nursery(orders: socket.socket, command: int) -> None:
    """Until the command ends: a guard with a rank for each order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        line, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not line:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            for place, number in enumerate(descriptors):
                os.dup2(number, 100 + place)
            os.closerange(3, 100)
            for target in (1, 2):
                os.dup2(100 + target, target)
            os.closerange(101, 103)
            _become_a_guard(json.loads(line), command)
        os.waitpid(between, 0)
        orders.sendall(os.read(reader, 32) + b"\n")
        for number in (reader, writer, *descriptors):
            os.close(number)


def _become_a_guard(order: dict[str, Any], command: int) -> None:
    """Never returns."""
    from slime_core.workers import guard

    os.setsid()
    until = time.monotonic() + _ADOPTED_S
    while os.getppid() != command and time.monotonic() < until:
        time.sleep(0.001)
    argv: list[str] = order["argv"]
    argv[argv.index("--control") + 1] = "100"

    def rank(words: list[str]) -> None:
        name = argv[argv.index("--pid-as") + 1]
        env = {**order["env"], name: str(os.getpid())}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        zygote.be_the_command({**order, "argv": words[words.index("slime_core") + 1 :], "env": env})

    os._exit(guard.main(argv, rank))
