"""Limits of the programs in a sandbox, together or each.

`local.py` reads the limits and passes them to the keeper as JSON. `memory_mb` applies twice: to the address space of
each process, and to the resident memory of all processes of the sandbox together, checked a few times a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox; megabytes are 2**20 bytes."""

    memory_mb: int = 1024
    """Address space of a process, and resident memory of all processes together."""
    disk_mb: int = 64
    """All files that the sandbox writes, together; without namespaces they are watched (`inside/disk.py`)."""
    file_mb: int = 16
    """Size of one file."""
    processes: int = 32
    """Number of processes and threads at a time."""
    open_files: int = 128
    """Number of file descriptors of a process."""
    stack_mb: int = 8
    """Stack size of a process; deep recursion in C needs more."""
    cpu_seconds: float = 600.0
    """CPU time of one process."""
    output_kb: int = 64
    """Size kept of standard output, and of standard error, of one command; the rest is read and dropped."""
    network: bool = False
    """Access to the host's network; without it not even the host's loopback is reachable."""
    endpoints: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Host and port outside to which connections to a port on 127.0.0.1 inside are forwarded, by inside port. No other
    address is reachable. For an agent that uses one server."""
    read_only: tuple[str, ...] = ()
    """Further host directories and files, read-only under the same path; they must be readable by all users."""
