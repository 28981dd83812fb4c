"""The connection to Ray: a local cluster of this run, which ends with it, or one that is running already.

`connected` is the whole interface. A cluster that happens to run on this machine is joined only when
`--ray-address` or RAY_ADDRESS names it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from slime_core.errors import ConfigError
from slime_core.procs.guarded import Guarded
from slime_core.protocols import Args
from slime_core.waits import waiting
from slime_launcher_ray.plugin import ray_address

logger = logging.getLogger(__name__)

START_DEADLINE = 150.0
"""Seconds for a local cluster to come up, or to join one that runs; Ray's own deadlines are shorter."""
STOP_DEADLINE = 30.0
_LEFTOVER_S = 10.0
"""For the guards of what an actor had started."""
_REACH = 5.0
_STORE = (128 << 20, 16 << 30)
"""Bytes of the object store of a local cluster: at least, at most."""
_PRELOADED = ("slime_core.launch", "torch")
"""Modules that the processes of a local cluster load while it starts; the first one says how OpenMP waits."""
_FEW_CORES = 8
"""Ray starts a process per core ahead of need: with more cores there is time enough to load modules later."""
_STORE_SHARE = 0.25
"""Of what is free in shared memory and of the machine's memory."""


def joins_another(args: Args) -> bool:
    """Whether `connected` will join a cluster that runs already, so that files can go to its nodes."""
    return not ray.is_initialized() and ray_address(args) is not None


@contextmanager
def connected(args: Args, package: Path | None = None) -> Iterator[None]:
    """Joined to Ray inside; a process that has joined before stays joined.

    Args:
        args: The run's settings.
        package: A folder that every actor finds on its `sys.path`, under its name.

    Raises:
        ConfigError: The cluster does not answer, or its Ray or Python is another version.
    """
    if ray.is_initialized():
        yield
        return
    address = ray_address(args)
    if address and ":" in address and "//" not in address:
        _check_reachable(address)
    _join(address, package)
    try:
        yield
    finally:
        with waiting("leaving Ray", deadline=STOP_DEADLINE, then="the process ends as it is", stop=True):
            ray.shutdown()


def _join(address: str | None, package: Path | None) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    keywords: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "configure_logging": False}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's workers are nice to its daemons by default; here they are the run, and starve beside other work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        keywords |= {"include_dashboard": False, "object_store_memory": store_size()}
        if (os.cpu_count() or 1) <= _FEW_CORES:
            keywords["_system_config"] = {"preload_python_modules": list(_PRELOADED)}
    if package is not None:
        keywords["runtime_env"] = {"py_modules": [str(package)]}
    where = f"--ray-address {address}" if address else "a local Ray cluster"
    handlers = _handlers()
    try:
        for last in [True] if address else [False, True]:
            try:
                with waiting(f"joining {where}", deadline=START_DEADLINE, then="the run stops", stop=True), _guarded():
                    return _init(keywords)
            except Exception as error:  # Ray raises that class itself where its processes do not come up in time
                if last:
                    raise ConfigError(f"{where}: {error}") from error
                logger.warning("%s did not come up, and is started once more: %s", where, error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _init(keywords: dict[str, Any]) -> None:
    """`ray.init`, whose processes import nothing that happens to lie in the working directory."""
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _OfThisProcess()
    try:
        ray.init(**keywords, job_config=job)
    except BaseException:
        ray.shutdown()
        raise


class _OfThisProcess(list[str]):
    """Places that Ray puts on its processes' `sys.path`: of those that it finds, what is on this one's."""

    def extend(self, more: Iterable[str]) -> None:
        """Also where Ray adds the working directory to them."""
        super().extend(place for place in more if place in sys.path)


class _Daemon(Guarded):
    """A process of Ray's under a guard, as Ray knows processes."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> None:
        super().__init__("a process of Ray", stop_s=STOP_DEADLINE, orphan_s=0.0, leftover_s=_LEFTOVER_S)
        out, err = (s.fileno() if hasattr(s, "fileno") else s for s in (streams["stdout"], streams["stderr"]))
        self.start(command, env, stdin=streams["stdin"] or subprocess.DEVNULL, stdout=out, stderr=err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """As Ray asks, `Popen.poll`."""
        self.returncode = super().poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """`Popen.wait`. Raises TimeoutExpired."""
        if super().wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.returncode

    terminate = Guarded.ask_to_stop
    kill = Guarded.ask_to_die


@contextmanager
def _guarded() -> Iterator[None]:
    """What Ray starts meanwhile has guards.

    A scheduler, `timeout` and `kill %1` send SIGTERM to all of the command's group. Ray's daemons would end at once
    (services.py: only SIGINT is kept from them), and the command could not make its last commit. When the command is
    killed, most end by themselves; its agents look for their parent only now and then.
    """
    module: Any = services
    start = module.ConsolePopen
    module.ConsolePopen = _Daemon
    try:
        yield
    finally:
        module.ConsolePopen = start


def _handlers() -> dict[int, Any]:
    """Signal handlers that Ray may replace; only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster answers there ({error}); `ray start --head --port {port}` starts"
            " one, and without --ray-address a local one is started for this run"
        ) from error


def store_size() -> int:
    """Bytes of shared memory for a local cluster: weights in buckets and batches go through it."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 62
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    least, most = _STORE
    return max(least, min(most, int(_STORE_SHARE * min(free, memory))))
