"""What the kernel says of processes of this host, from `/proc`: which are there, since when, and below whom.

Read by boards (is the process that published this still the same one?) and by the keepers of the cluster and of
SGLang's servers, which run this file outside of the package: standard library only, no imports of slime. What a reader
would get wrong: a number of a process is used again after its end, so a process is known by number and birth.
"""

from __future__ import annotations


def birth(pid: int) -> str:
    """When the kernel started a process, in ticks since boot: tells it from a later one with its number.

    Empty: it has ended, or the host has no `/proc`.
    """
    fields = _fields(pid)
    return fields[19] if fields else ""


def runs(pid: int) -> bool:
    """Whether a process is there, and more than an entry that nobody has waited for."""
    fields = _fields(pid)
    return bool(fields) and fields[0] != "Z"


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; the name before may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
