"""Find the processes of a sandbox through /proc, and end them.

`jobs.py` calls these functions in the sandbox's first process. Without a pid namespace /proc shows the host's
processes, too, so only descendants of this process count. Without /proc no process is found.
"""

from __future__ import annotations

import contextlib
import os
import signal

from slime_core.workers.guard import descendants

_PAGE = os.sysconf("SC_PAGE_SIZE")


def end_tree(pid: int) -> None:
    """Kill a process and the descendants that can still be found by their parents."""
    for _ in range(20):
        targets = descendants(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
        if not targets:
            break


def end_all() -> None:
    """Kill every process of the sandbox except this one; the caller collects their exit statuses."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    for _ in range(100):
        targets = descendants(os.getpid())
        if not targets:
            return
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)


def census(pids: list[int]) -> tuple[int, float]:
    """Return the processes' total threads and resident memory in 2**20 bytes, shared pages counted once."""
    threads = sum(map(_threads, pids))
    quick = sum(map(_private_pages, pids)) * _PAGE
    if quick < 64 << 20:
        return threads, quick / (1 << 20)
    return threads, sum(map(_share_kb, pids)) / 1024


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[17])
    return 0


def _private_pages(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
        fields = file.read().split()
        return int(fields[1]) - int(fields[2])
    return 0


def _share_kb(pid: int) -> int:
    """Return a process's proportional share of memory in KiB, or its private memory if the kernel hides the share."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _private_pages(pid) * _PAGE // 1024
