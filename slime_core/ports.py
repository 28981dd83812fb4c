"""TCP ports of this machine that are ours until we let go of them, also while nobody listens on them yet.

A free port that was only looked up may be gone when the server binds it. So each port is bound here and stays bound:
first without SO_REUSEADDR, which the kernel grants to one socket only, whoever asks, so that two runs never get the
same port; then the option is set, and the server, which sets it as every server does, may bind and listen beside us
(socket(7); ours never listens). The kernel keeps a bound port out of what it hands out by itself.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from slime_core.errors import EngineError

_TRIES = 200


class PortBlock:
    """Reserved ports; `close` (or the end of this process) gives them back."""

    def __init__(self, kept: contextlib.ExitStack, numbers: Sequence[int]) -> None:
        self._kept = kept
        self._numbers = tuple(numbers)

    def __getitem__(self, index: int) -> int:
        """The port at `index`, from 0."""
        return self._numbers[index]

    def __len__(self) -> int:
        """How many they are."""
        return len(self._numbers)

    def close(self) -> None:
        """Give the ports back. Safe twice."""
        self._kept.close()

    def __enter__(self) -> PortBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(count: int = 1, *, first: int | None = None) -> PortBlock:
    """Reserve ports on every address of this machine, IPv4 and, where there is one, IPv6.

    Args:
        count: So many; consecutive, but for what `first` says.
        first: The number of the first of them; the others are consecutive elsewhere.

    Raises:
        EngineError: `first` is taken, or no such block was found.
    """
    assert count >= 1, count
    with contextlib.ExitStack() as kept:
        if first is None:
            numbers = _block(count, kept)
            return PortBlock(kept.pop_all(), numbers)
        try:
            _bind(first, kept)
        except OSError as error:
            raise EngineError(f"port {first} is taken: {error.strerror}") from error
        rest = _block(count - 1, kept)
        return PortBlock(kept.pop_all(), [first, *rest])


def url_host(host: str) -> str:
    """`host` as URLs and HOST:PORT have it: an IPv6 address in brackets."""
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
