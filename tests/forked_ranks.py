"""The ranks that a command starts on this machine, as forks too: `install` runs in the fork that becomes the command.

Torch's agent starts an interpreter per rank, which imports for seconds what the process behind `tests.zygote` has
imported. Here it asks a second fork instead, made before the command does anything, so that a rank begins as a fresh
process does::

    zygote -> the command          torch's agent asks
           \\-> ... -> nursery -> (ends at once) -> rank, a child of the command, in a session of its own

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
"""For a rank to become a child of the command, on a busy machine."""


def install() -> None:
    """Make the nursery, and have torch's agent ask it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from slime_core.procs.keeper import _prctl

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a child's orphan becomes a child of this process
    command = os.getpid()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            _nursery(theirs, command)
        finally:
            os._exit(0)
    theirs.close()

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Forked:
        assert args[1:3] == ("-m", "slime_core"), args
        return Forked(ours, args, env, handler._stdout, handler._stderr)

    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment]


class Forked(subprocess.Popen[bytes]):
    """A rank as torch's agent knows it."""

    def __init__(self, nursery: socket.socket, args: tuple[str, ...], env: dict[str, str], out: Any, err: Any) -> None:
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = subprocess.threading.Lock()  # type: ignore[attr-defined]
        self._input, self._communication_started, self._child_created = None, False, True
        order = {"argv": args[3:], "env": env, "cwd": os.getcwd()}
        order |= {name: file.name for name, file in (("out", out), ("err", err)) if file}
        nursery.sendall(json.dumps(order).encode() + b"\n")
        with nursery.makefile("rb") as answers:
            self.pid = int(answers.readline())


def _nursery(orders: socket.socket, command: int) -> None:
    """Until the command ends: a rank for each line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with orders.makefile("rb") as lines:
        for line in lines:
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid:
                    os.write(writer, str(pid).encode())
                    os._exit(0)
                orders.detach()
                os.closerange(3, max(reader, writer) + 1)
                _become_a_rank(json.loads(line), command)
            os.waitpid(between, 0)
            orders.sendall(os.read(reader, 32) + b"\n")
            os.close(reader)
            os.close(writer)


def _become_a_rank(order: dict[str, Any], command: int) -> None:
    """Never returns."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    until = time.monotonic() + _ADOPTED_S
    while os.getppid() != command and time.monotonic() < until:
        time.sleep(0.001)
    zygote.be_the_command(order)
