"""Processes that train together: their number, their set-up, and, on this machine, their start and their end.

`launch/inline.py` calls `start_ranks` if the trainer's class needs processes and torchrun has not started any. This
process starts the same command once per rank, each under a guard (`workers/guard.py`), and hosts the store at which
they meet::

    slime train ...   checks everything, starts the ranks, waits
      rank 0          the run; its output is the command's
      rank 1, 2 ...   output in RUN_DIR/ranks

No rank prints its error. Each calls `report`, and the process that started the ranks raises the first error, since a
rank that fails makes the others fail, too. The report is written where torch's elastic agent reads it, so torchrun
shows it as well. A rank killed by a signal writes no report, and its peers then report broken connections; so a rank
without a report takes precedence.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from slime_core import errors
from slime_core.checkpoint.run_dir import SUMMARY, run_dir_of
from slime_core.config import Settings
from slime_core.errors import ConfigError, SlimeError, TrainError
from slime_core.files import replace_file
from slime_core.launch.drain import Drain, collect_seldom
from slime_core.launch.launchers import launcher_traits
from slime_core.protocols import Args
from slime_core.text import plain
from slime_core.waits import waiting
from slime_core.workers.process import Guarded, python, readable, signal_of

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared

_SELF = "RANK_PID_OF_SLIME"
"""Environment variable: the rank's process id, which distinguishes a rank from its child processes."""
ROLLOUTS = "ROLLOUTS_OF_SLIME"
"""Environment variable: number of rollouts of `--num-epoch`, counted by the process that starts the ranks."""


def env_int(name: str, default: int) -> int:
    """Return an environment variable as an integer; `default` if it is not set.

    Raises:
        ConfigError: The value is not an integer.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r}: an integer is needed; torchrun sets it") from error


def set_up_process(args: Args) -> None:
    """Set the number of threads, seed every random generator, and let the garbage collector run less often."""
    collect_seldom()
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
    return env_int("WORLD_SIZE", 1)


def processes_of(settings: Settings, trainer: object) -> int:
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
    return os.environ.get(_SELF) == str(os.getpid())


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


FOLDER = "ranks"
"""Folder of the run directory with the output of all ranks except 0."""
GRACE_S = 30.0
"""Seconds from the signal that ends a rank to SIGKILL; rank 0 stops its engines in this time."""
_LEFTOVER_S = 10.0
"""Seconds for guards to end the processes that a killed rank had started."""


def start_ranks(run: Prepared) -> dict[str, object]:
    """Run the command in `run.processes` processes on this machine, to the end; return rank 0's summary.

    `args.num_rollout` is set, even if it comes from `--num-epoch`.

    Raises:
        SlimeError: The error of the first rank that failed, or its exit status; the other ranks have been ended.
        KeyboardInterrupt: SIGINT or SIGTERM arrived; all ranks have been ended.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    args, count = run.args, run.processes
    command = [*python(), "-m", "slime_core", run.settings.command, *run.settings.argv]
    # This process hosts the store, so that no rank needs a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = run_dir_of(args) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [_guarded(rank, folder) for rank in range(count)]
    # Inside the run directory, so that the origin of a folder left behind by a kill is clear.
    with Drain(args.drain_timeout) as draining, tempfile.TemporaryDirectory(prefix=".errors-", dir=folder) as reports:
        draining.on_ask(lambda: _tell(ranks, draining))
        try:
            for number, rank in enumerate(ranks):
                rank.start(command, _environment(run, number, store.port, reports))
            with waiting(f"{count} ranks to end", deadline=None, then="each has deadlines of its own"):
                _wait(ranks)
        finally:
            _end(ranks)
        ends = {number: RankEnd.of(rank, Path(reports, str(number))) for number, rank in enumerate(ranks)}
        if draining.asked and ASKED_TO_END in {end.status for end in ends.values()}:
            # There was nothing to commit yet, or rank 0 took too long.
            draining.late = True
            signal.raise_signal(draining.number)  # for the handlers of the command
            raise KeyboardInterrupt
        if failed := {number: end for number, end in ends.items() if end.status}:
            raise first_error(failed, count, GRACE_S)
    summary: dict[str, object] = json.loads((run_dir_of(args) / SUMMARY).read_text(encoding="utf-8"))
    return summary


def _guarded(rank: int, folder: Path) -> Guarded:
    log = folder / f"rank_{rank}.log" if rank else None
    # Killed together with the command, since the next command may need what they hold, such as the run's lock.
    return Guarded(
        f"rank {rank}", stop_s=GRACE_S, orphan_s=0.0, leftover_s=_LEFTOVER_S, log=log, pid_as=_SELF, error=TrainError
    )


def _environment(run: Prepared, rank: int, port: int, reports: str) -> dict[str, str]:
    """Return a rank's environment: torchrun's variables, and those that slime's ranks also inherit."""
    args, count = run.args, run.processes
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank}
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    agent = {**meeting, "TORCHELASTIC_RESTART_COUNT": 0, ERROR_FILE: Path(reports, str(rank))}
    ours: dict[str, object] = {ROLLOUTS: args.num_rollout}
    if not args.save:  # outputs/train already holds a run when a rank looks for a free directory
        ours["SLIME_RUN_DIR"] = args.run_dir
    if not args.num_threads and "OMP_NUM_THREADS" not in os.environ:  # their share of the cores
        ours["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // count)
    return {**os.environ, **{name: str(value) for name, value in {**place, **sizes, **agent, **ours}.items()}}


def _wait(ranks: Sequence[Guarded]) -> None:
    """Wait until all ranks have ended, or one has failed."""
    running = {os.pidfd_open(rank.pid): rank for rank in ranks if rank.pid is not None}
    try:
        while running:
            for ended in readable(running):
                os.close(ended)
                if running.pop(ended).wait():
                    return
    finally:
        for left in running:
            os.close(left)


def _end(ranks: Sequence[Guarded]) -> None:
    """End all ranks at the same time."""
    for rank in ranks:
        rank.ask_to_stop()
    for rank in ranks:
        rank.stop()


def _tell(ranks: Sequence[Guarded], draining: Drain) -> None:
    """Forward SIGTERM: rank 0 drains, and the others can recognise a second signal. End at once if no rank started."""
    if not any(rank.alive for rank in ranks):
        draining.late = True
        signal.raise_signal(draining.number)
    for rank in ranks:
        rank.signal(signal.SIGTERM)


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's elastic agent."""
ASKED_TO_END = 128 + signal.SIGTERM
"""Exit status of a rank that ended on SIGTERM."""
TAIL_LINES = 20
"""Number of output lines shown for a rank that ended without a report."""
_REPORTED = "_slime_reported"
"""Attribute that `report` sets on an error that it has reported."""


def report(error: Exception) -> None:
    """Write the error for the process that started this rank, or print it if no process reads reports.

    Call it before anything is closed: closing makes the peers fail at once, and they would report first. An error is
    reported once.
    """
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    whole = "".join(traceback.format_exception(error))
    path = os.environ.get(ERROR_FILE)
    if not path:
        print(plain(whole), file=sys.stderr, flush=True)
        return
    known = isinstance(error, SlimeError) and hasattr(errors, type(error).__name__)
    found = {
        "message": f"{type(error).__name__}: {error}",
        "timestamp": int(time.time()),
        "time": time.time(),
        "kind": type(error).__name__ if known else None,
        "text": str(error),
        "traceback": None if isinstance(error, SlimeError) else whole,
    }
    replace_file(Path(path), json.dumps(found).encode())  # the agent may read now, if another rank has failed


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank: exit status, error report and output."""

    status: int
    """Exit status; 128 plus the signal number for a rank killed by a signal."""
    pid: int
    report: dict[str, Any] | None = None
    """Error report that the rank wrote."""
    log: Path | None = None
    """File with the rank's output; None if the rank prints to the command's output."""
    begin: int = 0
    """Byte of the log at which the rank's output begins."""

    @classmethod
    def of(cls, rank: Guarded, error_file: Path) -> RankEnd:
        """Build from a process that has ended."""
        found = json.loads(error_file.read_text(encoding="utf-8")) if error_file.exists() else {}
        return cls(rank.poll() or 0, rank.child, found if "kind" in found else None, rank.log, rank.begin)


def first_error(failures: Mapping[int, RankEnd], count: int, grace: float) -> SlimeError:
    """Return the error to raise when ranks have failed; print the traceback of an unexpected error.

    Args:
        failures: Rank -> how it ended.
        count: Number of ranks.
        grace: Seconds after which ranks that do not end are killed.
    """
    reports = {rank: failure.report for rank, failure in failures.items() if failure.report}
    silent = [
        rank for rank, failure in failures.items() if rank not in reports and not _was_asked(failure, reports, grace)
    ]
    if not silent and reports:
        rank = min(reports, key=lambda number: reports[number]["time"])
        return _reported(reports[rank], f"rank {rank} of {count}")
    rank = min(silent or failures)
    return _silent(failures[rank], f"rank {rank} of {count}")


def _was_asked(failure: RankEnd, reports: Mapping[int, Any], grace: float) -> bool:
    """Return True if the rank ended because another rank had failed."""
    if failure.status == ASKED_TO_END:
        return True
    earliest = min((found["time"] for found in reports.values()), default=time.time())
    return failure.status == 128 + signal.SIGKILL and time.time() - earliest >= grace


def _reported(found: Mapping[str, Any], whose: str) -> SlimeError:
    if found["traceback"]:
        print(plain(found["traceback"]), file=sys.stderr, flush=True)
        return TrainError(f"{whose} failed: {found['message']}")
    kind: type[SlimeError] = getattr(errors, found["kind"] or "TrainError")
    return kind(f"{whose}: {found['text']}")


def _silent(failure: RankEnd, whose: str) -> SlimeError:
    number = signal_of(failure.status)
    if number is None:
        ended = f"ended with exit status {failure.status}"
    else:
        ended = f"was killed by {number.name}"
        if number == signal.SIGKILL:
            ended += ", by the system if memory ran out"
    return TrainError(f"{whose} (process {failure.pid}) {ended}{_tail(failure)}")


def _tail(failure: RankEnd) -> str:
    """Return the end of the rank's output; empty for rank 0, whose output is on the terminal."""
    if failure.log is None:
        return ""
    lines = failure.log.read_bytes()[failure.begin :].decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"; {failure.log} ends with", *lines]) if lines else f"; {failure.log} is empty"
