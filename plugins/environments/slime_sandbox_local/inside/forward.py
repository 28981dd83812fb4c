"""Forward connections from inside a sandbox to the few outside addresses that it may reach.

::

    program --127.0.0.1:port--> listener of the first process --descriptor--> carrier (host's network) --> host:port

`carry` runs in a process of its own, forked before the network namespace is made; `listen` and `hand_over` run in the
sandbox's first process. The accepted connection is passed out of the namespace as a descriptor, so the program never
has a socket of the host's network.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import threading

from slime_sandbox_local.inside import kernel

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP = 0x8913, 0x8914, 1
_MOST_CONNECTIONS = 64
_CONNECT_SECONDS = 10.0


def raise_loopback() -> None:
    """Bring up `lo` of the namespace, so that programs inside may talk among themselves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack_from("16sh", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def listen(ports: list[int]) -> list[socket.socket]:
    """A listener on 127.0.0.1 for each port, in the namespace."""
    return [socket.create_server(("127.0.0.1", port)) for port in ports]


def hand_over(listener: socket.socket, carrier: socket.socket) -> None:
    """Accept one connection and give it to the carrier."""
    port = listener.getsockname()[1]
    connection, _ = listener.accept()
    with connection:
        rights = array.array("i", [connection.fileno()])
        with contextlib.suppress(BlockingIOError):  # the carrier is behind; the program sees the connection closed
            carrier.sendmsg([struct.pack(">H", port)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def carry(requests: socket.socket, endpoints: dict[int, tuple[str, int]]) -> None:
    """Serve until the other side is gone; called in the carrier's process. Never returns."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2, 1)
        if not message:
            os._exit(0)
        for descriptor in descriptors:
            inside = socket.socket(fileno=descriptor)
            if not places.acquire(blocking=False):
                inside.close()
                continue
            target = endpoints[struct.unpack(">H", message)[0]]
            threading.Thread(target=_one, args=(inside, target, places), daemon=True).start()


def _one(inside: socket.socket, target: tuple[str, int], places: threading.BoundedSemaphore) -> None:
    """Forward a connection in both directions until both sides have closed it."""
    try:
        with inside, socket.create_connection(target, timeout=_CONNECT_SECONDS) as outside:
            outside.settimeout(None)
            open_ways = {inside: outside, outside: inside}
            while open_ways:
                for source in select.select(list(open_ways), [], [])[0]:
                    part = source.recv(65_536)
                    if part:
                        open_ways[source].sendall(part)
                    else:
                        open_ways.pop(source).shutdown(socket.SHUT_WR)
    except OSError:
        return  # both sides are closed
    finally:
        places.release()
