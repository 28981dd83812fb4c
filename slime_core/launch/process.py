"""Initial setup of every process of a run (threads, seeds, garbage collection), the number of processes, and the rank
of this process."""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.launch.launchers import launcher_traits
from slime_core.protocols import Args

GC_THRESHOLDS = (50_000, 20, 10)
"""Thresholds of the cyclic garbage collector, by generation. With Python's 700, repeated scans of the samples and tasks
of a large rollout take more than half of the CPU time of dispatching them (`benchmarks/overhead.py`)."""
SELF = "RANK_PID_OF_SLIME"
"""Environment variable: the rank's process id, which distinguishes a rank from its child processes."""
ROLLOUTS = "ROLLOUTS_OF_SLIME"
"""Environment variable: number of rollouts of `--num-epoch`, counted by the process that starts the ranks."""


def set_up_process(args: Args) -> None:
    """Set the number of threads, seed every random generator, and let the garbage collector run less often.

    Keep the embedding program's collector thresholds if they are off or higher.
    """
    if 0 < gc.get_threshold()[0] < GC_THRESHOLDS[0]:
        gc.set_threshold(*GC_THRESHOLDS)
    # At exit the interpreter collects the objects of torch and transformers several times, which wastes half a second.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    random.seed(args.seed)
    numpy.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)


def is_leader() -> bool:
    """Return whether this process is torch's rank 0, which runs rollouts and records metrics."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes that train together. Raises ConfigError if torchrun's value is not a number."""
    text = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable WORLD_SIZE={text!r}: an integer is needed; torchrun sets it"
        ) from error


def processes_of(settings: Settings, trainer: Any) -> int:
    """Return the number of processes that train together in this run, on all nodes.

    Args:
        settings: The run's settings.
        trainer: The trainer's class; None for a run that does not train.

    Raises:
        ConfigError: torchrun started another number, or the run has several nodes and needs torchrun.
    """
    started = num_processes()
    by_torchrun = "WORLD_SIZE" in os.environ
    ask = getattr(trainer, "processes", None)
    if ask is None:
        return started
    needed: int | None = ask(settings)
    nodes = settings.args.actor_num_nodes
    if nodes > 1 and not by_torchrun and not launcher_traits(settings).spans_nodes:
        each = needed // nodes if needed else "N"
        raise ConfigError(
            f"{settings.cite('actor_num_nodes')}: --launcher {settings.args.launcher} starts processes on this machine"
            " only. Name one that has a cluster (such as --launcher ray), or on every node, type"
            f" torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d"
            " --rdzv-endpoint HOST:PORT"
            f" -m slime_core {settings.command} ... with the same settings"
        )
    if needed is None:
        return started
    if by_torchrun and started != needed:
        raise ConfigError(
            f"{settings.cite('train_backend')} needs {needed} process(es) with these settings, and torchrun started"
            f" {started}: type torchrun --nproc-per-node {needed}, or leave torchrun out"
        )
    return needed


def is_rank() -> bool:
    """Return whether `start_ranks` started this process."""
    return os.environ.get(SELF) == str(os.getpid())


def rollouts_told() -> int | None:
    """Return the number of rollouts that the process that started this rank counted; None if this is not a rank."""
    return int(os.environ[ROLLOUTS]) if is_rank() else None


@contextmanager
def as_rank() -> Iterator[None]:
    """Wrap the work of every process: a process that `start_ranks` started reports its error to its starter.

    Raises:
        SystemExit: A process that `start_ranks` started has failed.
    """
    if not is_rank():
        yield
        return
    from slime_core.launch.rank_errors import ASKED_TO_END, report

    if not is_leader():
        # The rank has nothing to clean up, and a handler would not run while it waits in a collective call.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(ASKED_TO_END) from None
    except Exception as error:
        report(error)
        raise SystemExit(1) from error
