"""Start several training processes on this machine, and wait for their end.

Called by `launch/inline.py` if the trainer's class needs processes and torchrun has not started any. This process
starts the same command once per rank, each under a guard (`workers/guard.py`), and hosts the store at which they meet::

    slime train ...   checks everything, starts the ranks, waits
      rank 0          the run; its output is the command's
      rank 1, 2 ...   output in RUN_DIR/ranks

No rank prints its error. The process that started the ranks reports the first error (`launch/rank_errors.py`), since a
rank that fails makes the others fail, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import TrainError
from slime_core.launch.drain import Drain
from slime_core.launch.process import ROLLOUTS, SELF
from slime_core.observability.run_dir import SUMMARY, run_dir_of
from slime_core.waits import waiting
from slime_core.workers.process import Guarded, python

if TYPE_CHECKING:
    from slime_core.launch.prepare import Prepared

FOLDER = "ranks"
"""Folder of the run directory with the output of all ranks except 0."""
PARENT = "RANK_OF_SLIME"
"""Environment variable with the id of the process that started this rank."""
GRACE_S = 30.0
"""Seconds from the signal that ends a rank to SIGKILL; rank 0 stops its engines in this time."""
_LEFTOVER_S = 10.0
"""Seconds for guards to end the processes that a killed rank had started."""


def start_ranks(run: Prepared) -> dict[str, Any]:
    """Run the command in `run.processes` processes on this machine, to the end; return rank 0's summary.

    `args.num_rollout` is set, even if it comes from `--num-epoch`.

    Raises:
        SlimeError: The error of the first rank that failed, or its exit status; the other ranks have been ended.
        KeyboardInterrupt: SIGINT or SIGTERM arrived; all ranks have been ended.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from slime_core.launch.rank_errors import ASKED_TO_END, RankEnd, first_error

    args, count = run.args, run.processes
    command = [*python(), "-m", "slime_core", run.settings.command, *run.settings.argv]
    # This process hosts the store, so that no rank needs a free port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = run_dir_of(args) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [_guarded(rank, folder) for rank in range(count)]
    # Inside the run directory, so that the origin of a folder left behind by a kill is clear.
    with Drain(args.drain_timeout) as draining, tempfile.TemporaryDirectory(prefix=".errors-", dir=folder) as errors:
        draining.on_ask(lambda: _tell(ranks, draining))
        try:
            for number, rank in enumerate(ranks):
                rank.start(command, _environment(run, number, store.port, errors))
            assert all(rank.child for rank in ranks)
            with waiting(f"{count} ranks to end", deadline=None, then="each has deadlines of its own"):
                _wait(ranks)
        finally:
            _end(ranks)
        ends = {number: RankEnd.of(rank, Path(errors, str(number))) for number, rank in enumerate(ranks)}
        if draining.asked and ASKED_TO_END in {end.status for end in ends.values()}:
            # There was nothing to commit yet, or rank 0 took too long.
            draining.late = True
            signal.raise_signal(draining.number)  # for the handlers of the command
            raise KeyboardInterrupt
        if failed := {number: end for number, end in ends.items() if end.status}:
            raise first_error(failed, count, GRACE_S)
    summary: dict[str, Any] = json.loads((run_dir_of(args) / SUMMARY).read_text(encoding="utf-8"))
    return summary


def _guarded(rank: int, folder: Path) -> Guarded:
    log = folder / f"rank_{rank}.log" if rank else None
    # Killed together with the command, since the next command may need what they hold, such as the run's lock.
    return Guarded(
        f"rank {rank}", stop_s=GRACE_S, orphan_s=0.0, leftover_s=_LEFTOVER_S, log=log, pid_as=SELF, error=TrainError
    )


def _environment(run: Prepared, rank: int, port: int, errors: str) -> dict[str, str]:
    """Return a rank's environment: torchrun's variables, and those that slime's ranks also inherit."""
    from slime_core.launch.rank_errors import ERROR_FILE

    args, count = run.args, run.processes
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank}
    sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    torch = {**meeting, "TORCHELASTIC_RESTART_COUNT": 0, ERROR_FILE: Path(errors, str(rank))}
    ours: dict[str, Any] = {PARENT: os.getpid(), ROLLOUTS: args.num_rollout}
    if not args.save:  # outputs/train already holds a run when a rank looks for a free directory
        ours["SLIME_RUN_DIR"] = args.run_dir
    if not args.num_threads and "OMP_NUM_THREADS" not in os.environ:  # their share of the cores
        ours["OMP_NUM_THREADS"] = max(1, len(os.sched_getaffinity(0)) // count)
    return {**os.environ, **{name: str(value) for name, value in {**place, **sizes, **torch, **ours}.items()}}


def _wait(ranks: Sequence[Guarded]) -> None:
    """Wait until all ranks have ended, or one has failed."""
    running = {os.pidfd_open(rank.pid): rank for rank in ranks if rank.pid is not None}
    try:
        while running:
            for ended in select.select(list(running), [], [])[0]:
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
