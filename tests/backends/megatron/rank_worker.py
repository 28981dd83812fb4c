"""The processes behind `RankPool`: a parent that has torch and Megatron imported, and its forks, one per rank.

Run as `python -m tests.backends.megatron.rank_worker`: reads `address rank world_size` from stdin and forks for each
line a worker that connects to that address and runs the job that comes from there. At the end of stdin all go.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client, Connection


def _parent() -> None:
    _import_all()
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        address, rank, world_size = line.split()
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _work(Client(address, "AF_UNIX"), int(rank), int(world_size))
            finally:
                os._exit(0)
    os.killpg(0, signal.SIGKILL)


def _import_all() -> None:
    for name in (
        "torch",
        "transformers",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
        "slime_core.learning.learner",
        "slime_trainer_megatron.trainer",
    ):
        importlib.import_module(name)


def _work(connection: Connection, rank: int, world_size: int) -> None:
    import torch

    torch.set_num_threads(1)
    connection.send((rank, os.getpid()))
    try:
        target, kwargs, environment = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **environment}
    try:
        module, name = target.split(":")
        answer = ("ok", getattr(importlib.import_module(module), name)(**kwargs))
    except BaseException:
        answer = ("failed", traceback.format_exc())
    connection.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError):
        connection.recv_bytes()  # peers may still talk to this one; whoever asked ends them all


if __name__ == "__main__":
    _parent()
