"""Jobs on several ranks: every job gets new processes, forks of one that has torch and Megatron imported.

`RankPool(2).run("tests.backends.megatron.test_attention:gradients", layout=...)` calls the function with these
arguments on both ranks, in the environment that torchrun gives, and returns every rank's result, rank 0's first.
Arguments and results are pickled. The function itself makes `ProcessGroups`, or joins `torch.distributed` from the
environment. If one rank raises or the deadline passes, the others, who may wait for it in a collective, are killed.
Processes are not kept for the next job. They cost a fork, and gloo's threads of process groups that are gone spin for
as long as the process lives.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 180
"""For the imports of the first pool, on a busy machine; not counted in a job's deadline."""


class RankError(Exception):
    """A job failed on a rank, with its traceback, or ended on none within its deadline."""


class RankPool:
    """`world_size` processes at a time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._store: Any = None

    def run(self, target: str, *, deadline: float = 90, **kwargs: Any) -> list[Any]:
        """Call `module:function` with `kwargs` on every rank and wait for all, `deadline` seconds at most.

        Raises:
            RankError: With the traceback of the rank that failed first.
        """
        self._start()
        # As under torchrun, whose agent holds the store: no rank opens a port, so none can be taken meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        job = pickle.dumps((target, kwargs, environment))
        for connection in self._connections:
            connection.send_bytes(job)
        try:
            return self._answers(target, deadline)
        finally:
            self.close()

    def _answers(self, target: str, deadline: float) -> list[Any]:
        until = time.monotonic() + deadline
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(list(waiting), timeout=max(until - time.monotonic(), 0))
            if not ready:
                raise RankError(f"{target}: no answer within {deadline} s from ranks {sorted(waiting.values())}")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    kind, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    kind, value = "failed", "the process ended"
                if kind == "failed":
                    raise RankError(f"{target} on rank {rank} of {self.world_size}:\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._connections, self._pids = [], []

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as directory, Listener(f"{directory}/ranks", "AF_UNIX") as listener:
            _Parent.fork(f"{directory}/ranks", self.world_size)
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            found = {}
            for _ in range(self.world_size):
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = (connection, pid)
        self._connections = [found[rank][0] for rank in range(self.world_size)]
        self._pids = [found[rank][1] for rank in range(self.world_size)]


class _Parent:
    """The one process that all pools' ranks are forks of."""

    process: ClassVar[subprocess.Popen[str] | None] = None

    @classmethod
    def fork(cls, address: str, world_size: int) -> None:
        if cls.process is None or cls.process.poll() is not None:
            cls.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.backends.megatron.rank_worker"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                text=True,
            )
        assert cls.process.stdin is not None
        for rank in range(world_size):
            cls.process.stdin.write(f"{address} {rank} {world_size}\n")
        cls.process.stdin.flush()

    @classmethod
    def end(cls) -> None:
        """End it, and with it every fork that is left."""
        if cls.process is not None:
            assert cls.process.stdin is not None
            cls.process.stdin.close()
            cls.process.wait(timeout=START_SECONDS)  # it may still import
            cls.process = None


def end_all() -> None:
    """After the last pool: nothing is left behind."""
    _Parent.end()
