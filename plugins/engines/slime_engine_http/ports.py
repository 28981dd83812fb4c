"""Reserve TCP ports of this machine until `close`, also before a server listens on them.

A port that was free when looked up may be taken when the server binds it. So `reserve` binds each port and keeps the
socket. It binds without SO_REUSEADDR: the kernel allows only one such socket, so two runs never get the same port. Then
it sets SO_REUSEADDR. The server sets the option too, as servers do, so it can bind the same port and listen (socket(7);
the reserving socket never listens). The kernel never picks a bound port as a free one.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from slime_core.errors import EngineError

_TRIES = 200


class PortBlock(contextlib.ExitStack):
    """Reserved ports; `close`, the end of its `with` block or the end of this process releases them."""

    numbers: Sequence[int] = ()

    def __getitem__(self, index: int) -> int:
        """Return the port at `index`, from 0."""
        return self.numbers[index]

    def __len__(self) -> int:
        """Return the number of ports."""
        return len(self.numbers)


def reserve(count: int = 1, *, first: int | None = None) -> PortBlock:
    """Reserve ports on every address of this machine, IPv4 and, if available, IPv6.

    Args:
        count: Number of ports; they are consecutive unless `first` is given.
        first: Number of the first port; the other ports are consecutive, but anywhere.

    Raises:
        EngineError: `first` is taken, or no block of free ports was found.
    """
    assert count >= 1, count
    with PortBlock() as bound:
        if first is None:
            numbers = _block(count, bound)
        else:
            try:
                _bind(first, bound)
            except OSError as error:
                raise EngineError(f"port {first} is taken: {error.strerror}") from error
            except OverflowError as error:
                raise EngineError(f"port {first}: allowed are 1 to 65535") from error
            numbers = [first, *_block(count - 1, bound)]
        block = bound.pop_all()
        block.numbers = numbers
        return block


def url_host(host: str) -> str:
    """Return `host` for a URL or HOST:PORT: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _block(count: int, kept: contextlib.ExitStack) -> list[int]:
    """Bind `count` consecutive ports. Raises EngineError."""
    if count == 0:
        return []
    for _ in range(_TRIES):
        with contextlib.ExitStack() as bound:
            try:
                first = _bind(0, bound)
                if first + count <= 65_536:
                    for port in range(first + 1, first + count):
                        _bind(port, bound)
                    kept.push(bound.pop_all())
                    return list(range(first, first + count))
            except OSError:
                continue
    raise EngineError(f"no {count} consecutive free ports were found on this machine in {_TRIES} tries")


def _bind(port: int, kept: contextlib.ExitStack) -> int:
    """Bind a port, any for 0, in each address family. Raises OSError."""
    for family in _families():
        made = kept.enter_context(socket.socket(family, socket.SOCK_STREAM))
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(made.getsockname()[1])
    return port


def _families() -> list[socket.AddressFamily]:
    families = [socket.AF_INET]
    if socket.has_ipv6:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
            families.append(socket.AF_INET6)
    return families
