"""Several training processes on this machine: how many a run needs, starting them, and being one of them.

`launch.run` and `launch/inline.py` call it. Where the trainer's class asks for processes and torchrun has not started
any, this process becomes torch's elastic agent and starts the same command once per rank::

    slime train ...   checks everything, starts the ranks, waits
      rank 0          the run; its output is the command's
      rank 1, 2 ...   output in RUN_DIR/ranks

What a reader would get wrong: no rank prints its error. It leaves it to the process that started it, which tells the
first one (`launch/rank_errors.py`), since a rank that fails makes the others fail, too.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.launch.drain import Drain
from slime_core.launch.launchers import launcher_traits
from slime_core.launch.process import is_leader, num_processes
from slime_core.launch.rank_errors import ASKED_TO_END, first_error, report
from slime_core.observability.run_dir import SUMMARY, run_dir_of
from slime_core.protocols import Args
from slime_core.waits import waiting

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared

FOLDER = "ranks"
"""Folder of the run directory with the output of all ranks but 0."""
PARENT = "RANK_OF_SLIME"
"""Environment variable: the process that started this rank."""
ROLLOUTS = "ROLLOUTS_OF_SLIME"
"""Environment variable: how many rollouts `--num-epoch` is, which the process that starts the ranks has counted."""
GRACE_S = 30
"""From the signal that ends a rank to SIGKILL: rank 0 stops its engines meanwhile."""
_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those for which torch's agent sets handlers."""


def processes_of(settings: Settings, trainer: Any) -> int:
    """Processes that train together in this run, on all nodes.

    Args:
        settings: The run's.
        trainer: The trainer's class; None for a run that does not train.

    Raises:
        ConfigError: torchrun has started another number, or has to start them, since there are several nodes.
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
    """Whether this process is one that `start_ranks` started."""
    return os.environ.get(PARENT) == str(os.getppid())


def rollouts_told() -> int | None:
    """What the process that started this rank has counted; None in others."""
    return int(os.environ[ROLLOUTS]) if is_rank() else None


@contextmanager
def as_rank() -> Iterator[None]:
    """Around the work of every process: one that `start_ranks` started ends with its parent, and reports its error.

    Raises:
        SystemExit: Such a process has failed.
    """
    if not is_rank():
        yield
        return
    from slime_core.procs.keeper import die_with

    if not die_with(int(os.environ[PARENT])):
        raise SystemExit(1)
    if not is_leader():
        # It has nothing to clean up, and a handler would not run while it waits in a collective call.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(ASKED_TO_END) from None
    except Exception as error:
        report(error)
        raise SystemExit(1) from error


def start_ranks(run: Prepared) -> dict[str, Any]:
    """Run the command in `run.processes` processes on this machine, to the end; returns rank 0's summary.

    `args.num_rollout` is known, also where it comes from `--num-epoch`.

    Raises:
        SlimeError: What the first rank to fail raised, or how it ended; the others have been ended.
        KeyboardInterrupt: SIGINT or SIGTERM; all of them have been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    args, count = run.args, run.processes
    folder = run_dir_of(args) / FOLDER
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=time.strftime("%Y%m%d-%H%M%S"),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=GRACE_S,
        **_left_to_agent(LaunchConfig),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=dict.fromkeys(range(1, count), Std.ALL)),
    )
    stopped: signal.Signals | None = None
    with _quiet_agent(), Drain(args.drain_timeout) as draining, _environment(args, count):
        draining.on_ask(lambda: _tell_ranks(draining))
        try:
            with waiting(f"{count} ranks to end", deadline=None, then="each has deadlines of its own"):
                elastic_launch(config, sys.executable)("-m", "slime_core", run.settings.command, *run.settings.argv)
        except ChildFailedError as failed:
            if draining.asked and {f.exitcode for f in failed.failures.values()} & {ASKED_TO_END, -signal.SIGTERM}:
                # There was nothing to commit yet, or rank 0 took too long.
                draining.late, stopped = True, draining.number
            else:
                raise first_error(failed.failures, count, folder, GRACE_S) from None
        except SignalException as caught:
            stopped = caught.sigval
    if stopped is not None:
        signal.raise_signal(stopped)  # for the handlers of the command
        raise KeyboardInterrupt
    summary: dict[str, Any] = json.loads((run_dir_of(args) / SUMMARY).read_text(encoding="utf-8"))
    return summary


def _left_to_agent(config: type) -> dict[str, Any]:
    """The signals that no run drains at: SIGTERM and SIGINT are the command's, where it has handlers for them.

    Before torch 2.9 there is no such choice: they end a run of several ranks at once.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL or not hasattr(config, "signals_to_handle"):
        return {}
    return {"signals_to_handle": ",".join(n.name for n in _TERMINATING if n not in (signal.SIGTERM, signal.SIGINT))}


@contextmanager
def _environment(args: Args, count: int) -> Iterator[None]:
    """What the ranks inherit: whose they are, and without `--num-threads` their share of the cores."""
    wanted = {PARENT: str(os.getpid()), ROLLOUTS: str(args.num_rollout)}
    if not args.num_threads and "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:  # torch's agent leaves settings of its own there
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _tell_ranks(draining: Drain) -> None:
    """Hand SIGTERM on: rank 0 drains, and the others know a second one when it comes. Before there are any, end."""
    mine, told = f"{PARENT}={os.getpid()}".encode(), False
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\nPPid:\t{os.getpid()}\n" not in (process / "status").read_text(encoding="utf-8"):
                continue
            if mine in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)
                told = True
    if not told:
        draining.late = True
        signal.raise_signal(draining.number)


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Without the agent's log, which would tell again what this module tells; its signal handlers are taken back."""
    at_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _TERMINATING} if at_main else {}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler)
