"""Make a sandbox, start its first process, and wait outside the sandbox until that process ends.

::

    slime --> guard (slime_core/workers) --> run --fork--> first process (jobs.py) --> jobs
      |                                                          ^
      +------------- socket: requests, answers -----------------+

`keeper.py` starts the guard, a fresh interpreter; the other processes are forks of it. If any process ends, all end:
the first process ends when the socket is closed, and its pid namespace with it. Without a pid namespace the guard ends
the remaining processes. The first answer, `hello`, lists the isolation that is missing; the caller decides whether the
rest is enough.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from typing import Any

from slime_core.workers.guard import die_with
from slime_sandbox_local.inside import disk, forward, kernel, landlock, messages, namespaces, processes, root_dir
from slime_sandbox_local.inside.jobs import Server
from slime_sandbox_local.inside.rights import Confinement
from slime_sandbox_local.inside.syscall_filter import filter_program
from slime_sandbox_local.inside.user import Refused, counted_before, program_user


def run(command: list[str]) -> None:
    """Run a sandbox; the guard's `command` is the number of the socket's descriptor. Never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent by the guard; the first process ends by the socket instead
    os.chdir("/")
    control = socket.socket(fileno=int(command[0]))
    settings = _settings(control)
    limits = settings["limits"]
    endpoints = {int(port): (host, int(number)) for port, (host, number) in limits["endpoints"].items()}
    carrier = _carrier(endpoints, control) if endpoints else None
    outer_user = os.geteuid()
    missing, alone = namespaces.separate(network=limits["network"])
    temporary = "" if _has_mounts(missing) else _temporary(settings)
    first = os.fork()
    if first == 0:
        _first(control, settings, missing, temporary, carrier, (outer_user, alone))
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    control.close()
    if carrier is not None:
        carrier.close()
    os.waitpid(first, 0)
    if temporary:
        disk.remove(temporary)
    os._exit(0)


def _settings(control: socket.socket) -> dict[str, Any]:
    buffer = bytearray()
    while (message := messages.take(buffer)) is None:
        part = control.recv(65_536)
        if not part:
            os._exit(1)
        buffer += part
    return message[0]


def _has_mounts(missing: dict[str, str]) -> bool:
    return not {"user namespace", "mount namespace", "pid namespace"} & missing.keys()


def _carrier(endpoints: dict[int, tuple[str, int]], control: socket.socket) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            control.close()
            forward.carry(theirs, endpoints)
        finally:
            os._exit(1)
    theirs.close()
    return ours


def _temporary(settings: dict[str, Any]) -> str:
    """Make the parent of the working directory on the host's disk, for a sandbox without mounts; return its path."""
    made = tempfile.mkdtemp(prefix="slime-sandbox-", dir=settings["temporary"])
    os.chmod(made, 0o711)
    return made


def _first(
    control: socket.socket,
    settings: dict[str, Any],
    missing: dict[str, str],
    temporary: str,
    carrier: socket.socket | None,
    who: tuple[int, bool],
) -> None:
    """Complete the isolation, send `hello` and serve; called in the sandbox's first process. Never returns."""
    if not die_with(os.getppid()):
        os._exit(1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    limits = settings["limits"]
    try:
        if not temporary:
            missing |= root_dir.enter_root(
                settings["readable"], user=namespaces.USER, disk_mb=limits["disk_mb"], network=limits["network"]
            )
        work = f"{temporary}/work" if temporary else root_dir.WORK
        confinement = _confinement(settings, missing, work, *who)
        if temporary:
            disk.make(work, confinement.user)
        # The user belongs to this sandbox alone, and Landlock does not block directories that all users may write to.
        strewing = confinement.user if temporary and who[0] == 0 and "landlock" in missing else None
        environment = {**settings["env"], "HOME": work, "TMPDIR": _tmp(work)}
        server = Server(control, confinement, environment, work, strewing)
        if "network namespace" not in missing and "user namespace" not in missing and not limits["network"]:
            forward.raise_loopback()
            if carrier is not None:
                ports = [int(port) for port in limits["endpoints"]]
                server.serve_ports(forward.listen(ports), carrier)
        control.sendall(messages.pack({"missing": missing, "work": work}))
    except Exception as error:
        if temporary:
            disk.remove(temporary)
        failed = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        control.sendall(messages.pack({"failed": failed, "missing": missing}))
        os._exit(1)
    server.serve()
    if temporary:
        processes.end_all()
        disk.remove(temporary, *disk.strewn(strewing))
    os._exit(0)


def _tmp(work: str) -> str:
    return "/tmp" if work == root_dir.WORK else work


def _confinement(
    settings: dict[str, Any], missing: dict[str, str], work: str, outer_user: int, alone: bool
) -> Confinement:
    """Return the confinement of jobs; add missing isolation to `missing`. Raises Refused."""
    limits, own_files = settings["limits"], work == root_dir.WORK
    separate = "user namespace" not in missing
    own_network = separate and "network namespace" not in missing and not limits["network"]
    try:
        program = filter_program(ip_sockets=own_network or limits["network"], unix_sockets=own_files and own_network)
    except OSError as error:
        program, missing["filter of system calls"] = b"", str(error)
    user = program_user(
        [*settings["readable"], settings["temporary"]],
        root=outer_user == 0, separate=separate, alone=alone, own_files=own_files,
    )  # fmt: skip
    if not own_files:
        same_user = user is None or (separate and not alone)
        missing |= landlock.lacks(same_user=same_user)
        if same_user and "landlock" in missing:
            missing["wall before the files and processes of slime's user"] = "programs are that user"
    counted = counted_before(user, separate=separate, alone=alone)
    return Confinement(limits, program, tuple(settings["readable"]), "" if own_files else work, user, counted)
