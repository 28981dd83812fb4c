"""Looking at the processes of a sandbox through /proc, and ending them.

`jobs.py` calls these in the sandbox's first process. Without a pid namespace /proc shows the host's processes too, so
only descendants of this one count; without a /proc there are none.
"""

from __future__ import annotations

import contextlib
import os
import signal

from slime_core.procs.guard import descendants

_PAGE = os.sysconf("SC_PAGE_SIZE")


def end_tree(pid: int) -> None:
    """Kill a process and what it started, as far as it can still be told by parents."""
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
    """Kill every process of the sandbox but this one; how they ended is the caller's to collect."""
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
    """Of these together: threads, and resident memory in 2**20 bytes, shared pages counted once."""
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
    """Its proportional share, where the kernel lets us see it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _private_pages(pid) * _PAGE // 1024
