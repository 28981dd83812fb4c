"""Processes of this host as `/proc` lists them: existence and start time.

Boards and the actors of Ray ask whether the process that wrote something still runs. The kernel reuses a process id
after the process has ended, so a process is identified by its id and its birth.
"""

from __future__ import annotations


def birth(pid: int) -> str:
    """Return the start time of a process in ticks since boot, which differs for a later process with the same id.

    The result is empty if the process has ended or the host has no `/proc`.
    """
    fields = _fields(pid)
    return fields[19] if fields else ""


def runs(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    fields = _fields(pid)
    return bool(fields) and fields[0] != "Z"


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the name before it may contain any character."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
