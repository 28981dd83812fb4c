"""What the programs of one sandbox may use, together or each.

Read by `local.py`, which hands it to the keeper as JSON. `memory_mb` holds twice: as the address space of each process,
and as what all processes of the sandbox have resident together, looked at some times a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox; megabytes are 2**20 bytes."""

    memory_mb: int = 1024
    """Address space of a process, and resident memory of all of them together."""
    disk_mb: int = 64
    """All files that it writes, together; without namespaces they are watched (`inside/disk.py`)."""
    file_mb: int = 16
    """One file."""
    processes: int = 32
    """Processes and threads at a time."""
    open_files: int = 128
    """Descriptors of a process."""
    stack_mb: int = 8
    """Stack of a process; deep recursion in C needs more."""
    cpu_seconds: float = 600.0
    """CPU time of one process."""
    output_kb: int = 64
    """Kept of standard output, and of standard error, of one command; the rest is read and dropped."""
    network: bool = False
    """The host's network; without it not even the loopback of the host is reachable."""
    endpoints: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Port on 127.0.0.1 inside -> (host, port) outside that connections to it are carried to. Nothing else is
    reachable; for an agent that talks to one server."""
    read_only: tuple[str, ...] = ()
    """Further host directories and files to see, read only, under the same path; they must be readable to everybody."""
