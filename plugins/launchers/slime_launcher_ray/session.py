"""The connection to Ray: a local cluster of this run, which ends with the run, or a cluster that is already running.

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
from slime_core.protocols import Args
from slime_core.waits import waiting
from slime_core.workers.process import Guarded
from slime_launcher_ray.plugin import ray_address

logger = logging.getLogger(__name__)

START_DEADLINE = 150.0
"""Seconds to start a local cluster or to join a running cluster; Ray's own deadlines are shorter."""
STOP_DEADLINE = 30.0
_LEFTOVER_S = 10.0
"""Seconds for the guards of processes that an actor started."""
_REACH = 5.0
_STORE = (128 << 20, 16 << 30)
"""Minimum and maximum size of a local cluster's object store, in bytes."""
_PRELOADED = ("slime_core.launch", "torch")
"""Modules that the processes of a local cluster load while it starts; the first module sets how OpenMP waits."""
_FEW_CORES = 8
"""Ray starts a process per core in advance; with more cores than this, modules can be loaded later."""
_STORE_SHARE = 0.25
"""Share of free shared memory and of the machine's memory that the object store may use."""


def joins_another(args: Args) -> bool:
    """Return whether `connected` will join a running cluster, to whose nodes files can be sent."""
    return not ray.is_initialized() and ray_address(args) is not None


@contextmanager
def connected(args: Args, package: Path | None = None) -> Iterator[None]:
    """Connect to Ray for the block; a process that was connected before stays connected.

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
        # By default, Ray's workers have a lower priority than its daemons; here they do the work and would starve.
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
            except Exception as error:  # Ray raises plain Exception if its processes do not start in time
                if last:
                    raise ConfigError(f"{where}: {error}") from error
                logger.warning("%s did not come up, and is started once more: %s", where, error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _init(keywords: dict[str, Any]) -> None:
    """Call `ray.init` so that its processes do not import modules that happen to be in the working directory."""
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _OfThisProcess()
    try:
        ray.init(**keywords, job_config=job)
    except BaseException:
        ray.shutdown()
        raise


class _OfThisProcess(list[str]):
    """Entries that Ray puts on its processes' `sys.path`, limited to the entries of this process's `sys.path`."""

    def extend(self, more: Iterable[str]) -> None:
        """Add the entries that this process's `sys.path` has; Ray also adds the working directory through here."""
        super().extend(place for place in more if place in sys.path)


class _Daemon(Guarded):
    """A guarded Ray process with the interface of `Popen` that Ray expects."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> None:
        super().__init__("a process of Ray", stop_s=STOP_DEADLINE, orphan_s=0.0, leftover_s=_LEFTOVER_S)
        out, err = (s.fileno() if hasattr(s, "fileno") else s for s in (streams["stdout"], streams["stderr"]))
        self.start(command, env, stdin=streams["stdin"] or subprocess.DEVNULL, stdout=out, stderr=err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs, as `Popen.poll` does."""
        self.returncode = super().poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait as `Popen.wait` does. Raises TimeoutExpired."""
        if super().wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.returncode

    terminate = Guarded.ask_to_stop
    kill = Guarded.ask_to_die


@contextmanager
def _guarded() -> Iterator[None]:
    """Guard the processes that Ray starts within the block.

    A scheduler, `timeout` and `kill %1` send SIGTERM to the whole process group of the command. Ray's daemons would end
    at once (services.py shields them from SIGINT only), and the command could not make its last commit. If the command
    is killed, most daemons end by themselves; Ray's agents check for their parent only occasionally.
    """
    module: Any = services
    start = module.ConsolePopen
    module.ConsolePopen = _Daemon
    try:
        yield
    finally:
        module.ConsolePopen = start


def _handlers() -> dict[int, Any]:
    """Keep the signal handlers that Ray may replace; only the main thread has any."""
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
    """Return the bytes of shared memory for a local cluster; weights in buckets and batches pass through it."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 62
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    least, most = _STORE
    return max(least, min(most, int(_STORE_SHARE * min(free, memory))))
