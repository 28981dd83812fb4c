"""`python -m slime_submit.allocation FOLDER`: the task of each node of a Slurm job of `slime submit`.

    one node       the run, in a process of its own (`job`)
    several nodes  Ray on each, started here; the first node's task also starts the run, with the cluster's address

The first task passes SIGTERM to the run, which drains: it commits and ends. Then, by what Slurm says of the job:

    preempted, in its grace time   requeue; Slurm would take the job for complete
    near its time limit            drain before Slurm's signal, and requeue, if the run got as far as a commit
    cancelled, or requeued         a second SIGTERM before KillWait is over, at which the run ends at once
    otherwise                      `scancel --signal=TERM`: the run ends with --drain-timeout, and the job with it
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from slime_core.checkpoint.store import CheckpointStore
from slime_core.errors import SlimeError
from slime_core.files import replace_file
from slime_core.waits import gave_up, waiting
from slime_core.workers.process import Guarded
from slime_submit.job import ORDER
from slime_submit.slurm import ask, look

_TICK = 0.5
_MARGIN_S = 10.0
"""Seconds for the run to end at once, and more than a drain takes before the time limit."""
_SAME_S = 5.0
"""Seconds within which signals are one event."""
_LARGEST_SHARE = 0.25
"""Largest share of the time limit that a drain may take."""
_RAY_S = 300.0
"""Deadline for Ray to start on the first node, and on the others after it."""

_TOKEN = "RAY_AUTH_TOKEN"


def main() -> int:
    """Run this node's part of the job and return its exit status."""
    folder = Path(sys.argv[1])
    job, rank, nodes = (os.environ[f"SLURM_{name}"] for name in ("JOB_ID", "PROCID", "NNODES"))
    attempt = f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    try:
        if rank != "0":
            _member(folder, attempt, rank)
            return 0
        run = Run(folder, order, job)
        if nodes == "1":
            return run.run({})
        with _head(folder, attempt, int(nodes)) as variables:
            return run.run(variables)
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 1


class Run:
    """The run of a job, and its part in the job's end.

    Args:
        folder: The job's folder.
        order: Its `job.json`.
        job: Slurm's id of the job.
    """

    def __init__(self, folder: Path, order: dict[str, Any], job: str) -> None:
        self._command = [sys.executable, "-m", "slime_submit.job", str(folder)]
        self._order, self._job = order, job
        self._store = CheckpointStore(Path(order["save"], "checkpoints"))
        self._commits = self._store.commits()[-1:]
        self._signals = 0
        self._at_once: float | None = None
        """Time of the second SIGTERM (`time.monotonic`)."""
        self._drain_at: float | None = None
        """Time of the drain before the time limit (`time.time`)."""
        self._requeue_for = ""
        """Reason to requeue the job if the run does not end by itself."""

    def run(self, variables: dict[str, str]) -> int:
        """Run to the end, or to a drain; requeue the job if that was not the user's wish."""
        self._drain_at = self._before_limit()
        before = signal.signal(signal.SIGTERM, self._on_term)
        # Guarded, so that a signal to the step reaches the run once, from here.
        child = Guarded("the run", orphan_s=0.0)
        try:
            child.start(self._command, {**os.environ, **variables})
            status = self._follow(child)
        finally:
            signal.signal(signal.SIGTERM, before)
            child.stop()
        if status and self._requeue_for:
            self._requeue()
        return status

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _follow(self, child: Guarded) -> int:
        passed, since = 0, float("-inf")
        with waiting("the run", deadline=None, then="it has deadlines of its own"):
            while (status := child.poll()) is None:
                time.sleep(_TICK)
                now = time.monotonic()
                if self._signals > passed and now - since < _SAME_S:
                    passed = self._signals  # one event, which reached this task on two ways
                elif self._signals > passed:
                    first, passed, since = not passed, self._signals, now
                    child.signal(signal.SIGTERM)
                    if first:
                        self._ask_why()
                if self._at_once is not None and now >= self._at_once:
                    self._at_once = None
                    child.signal(signal.SIGTERM)
                if self._drain_at is not None and time.time() >= self._drain_at:
                    self._drain_at = self._before_limit()  # the limit may have been raised
                    if self._drain_at is None or time.time() >= self._drain_at:
                        self._drain_at, self._requeue_for = None, "its time limit"
                        child.signal(signal.SIGTERM)
        return status

    def _ask_why(self) -> None:
        """Find out what the signal means for the job. Without an answer the run drains as for any SIGTERM."""
        began = time.monotonic()
        try:
            fields = look(self._job)
            if fields["JobState"] != "RUNNING":
                wait = float(_value(ask("show", "config"), "KillWait").split()[0])
                self._at_once = began + max(wait - _MARGIN_S, wait / 2)
            elif fields["PreemptTime"] != "None":
                self._requeue_for = "a job of higher priority"
        except SlimeError as error:
            print(f"slime: warning: {error}", file=sys.stderr, flush=True)

    def _before_limit(self) -> float | None:
        """Return the time at which the run must drain to end before the job's time limit; None without a limit."""
        try:
            fields = look(self._job)
        except SlimeError as error:
            print(f"slime: warning: no drain before the time limit: {error}", file=sys.stderr, flush=True)
            return None
        if fields["EndTime"] == "Unknown" or fields["TimeLimit"] == "UNLIMITED":
            return None
        begin, end = (datetime.fromisoformat(fields[name]).timestamp() for name in ("StartTime", "EndTime"))
        margin = float(self._order["drain_timeout"]) + _MARGIN_S
        return end - min(margin, _LARGEST_SHARE * (end - begin))

    def _requeue(self) -> None:
        if self._requeue_for == "its time limit" and self._store.commits()[-1:] == self._commits:
            print("slime: the job is not requeued: the run made no commit within its time limit", file=sys.stderr)
            return
        try:
            fields = look(self._job)
            if fields["JobState"] == "RUNNING" and fields["Requeue"] == "1":
                print(f"slime: requeued for {self._requeue_for}; the run goes on from its commit", flush=True)
                ask("requeue", self._job)
        except SlimeError as error:
            print(f"slime: warning: the job is not requeued: {error}", file=sys.stderr, flush=True)


# -- Ray on the nodes of a job ---------------------------------------------------------------------------------


@contextmanager
def _head(folder: Path, attempt: str, nodes: int) -> Iterator[dict[str, str]]:
    """Start a Ray cluster's first node, whose address the others read from a file; yield variables once all joined."""
    os.environ.update(_with_token(secrets.token_hex(32)))
    from ray.util import get_node_ip_address

    with socket.socket() as free:
        free.bind(("", 0))
        host, port = get_node_ip_address(), free.getsockname()[1]
    note, address = _note(folder, attempt), f"{host}:{port}"
    place = (f"--node-ip-address={host}", f"--port={port}", f"--temp-dir={_temporary(attempt)}")
    with _ray(folder, attempt, "0", "--head", *place, "--include-dashboard=0"):
        _until_reachable(host, port)
        replace_file(note, f"{address} {os.environ[_TOKEN]}".encode())
        try:
            _until_joined(address, nodes, folder)
            yield {"RAY_ADDRESS": address}
        finally:
            note.unlink()


def _member(folder: Path, attempt: str, rank: str) -> None:
    """Run a further node of the cluster until the first node's task removes the address. Raises SlimeError."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first node's task decides when the run ends
    note, end = _note(folder, attempt), time.monotonic() + _RAY_S
    with waiting(f"Ray on the first node ({note})", deadline=_RAY_S, then="the job ends"):
        while not note.exists():
            if time.monotonic() >= end:
                raise SlimeError(gave_up(f"Ray on the first node ({note})", _RAY_S, "the job ends"))
            time.sleep(_TICK)
    address, token = note.read_text(encoding="utf-8").split()
    os.environ.update(_with_token(token))
    with (
        _ray(folder, attempt, rank, f"--address={address}"),
        waiting("the run on the first node", deadline=None, then="Slurm ends this task after that node's"),
    ):
        while note.exists():
            time.sleep(_TICK)


@contextmanager
def _ray(folder: Path, attempt: str, rank: str, *flags: str) -> Iterator[None]:
    """Run `ray start` until the block ends. Its processes are guarded: a signal to the step does not end them."""
    from slime_launcher_ray.session import store_size

    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    ray = Guarded(f"Ray on node {rank}", stop_s=_MARGIN_S, log=folder / f"ray-{attempt}-{rank}.log")
    ray.start([
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *(f"--num-cpus={cpus}", f"--object-store-memory={store_size()}", *flags),
    ])  # fmt: skip
    try:
        yield
    finally:
        ray.stop()
        shutil.rmtree(_temporary(attempt), ignore_errors=True)


def _with_token(token: str) -> dict[str, str]:
    """Return the variables with which Ray's processes, and the run's, accept and send the token."""
    return {"RAY_AUTH_MODE": "token", _TOKEN: token}


def _until_reachable(host: str, port: int) -> None:
    end = time.monotonic() + _RAY_S
    with waiting(f"Ray at {host}:{port}", deadline=_RAY_S, then="the job ends"):
        while True:
            try:
                socket.create_connection((host, port), timeout=_TICK).close()
                return
            except OSError as error:
                if time.monotonic() >= end:
                    raise SlimeError(f"{gave_up(f'Ray at {host}:{port}', _RAY_S, 'the job ends')} ({error})") from error
                time.sleep(_TICK)


def _until_joined(address: str, nodes: int, folder: Path) -> None:
    """Wait until all nodes of the job are nodes of the cluster. Raises SlimeError."""
    import ray

    end, what = time.monotonic() + _RAY_S, f"{nodes} nodes of Ray"
    with waiting(what, deadline=_RAY_S, then="the job ends"):
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        try:
            while (there := sum(node["Alive"] for node in ray.nodes())) < nodes:
                if time.monotonic() >= end:
                    said = gave_up(what, _RAY_S, "the job ends")
                    raise SlimeError(f"{said}: {there} joined; {folder}/ray-*.log has what the others printed")
                time.sleep(_TICK)
        finally:
            ray.shutdown()


def _note(folder: Path, attempt: str) -> Path:
    return folder / f"ray-{attempt}.address"


def _temporary(attempt: str) -> str:
    """Return Ray's folder of logs and sockets on every node, whose default all users of a node would share."""
    return f"/tmp/ray-{attempt}"


def _value(text: str, name: str) -> str:
    """Return a value of `scontrol show config`."""
    return next(line.partition("=")[2].strip() for line in text.splitlines() if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
