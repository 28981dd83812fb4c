"""Ports for what listens later, in another process."""

from __future__ import annotations

import random
import socket

_CHANCE = random.SystemRandom()


def free_port() -> int:
    """A port nobody listens on, and none of those that the kernel gives to whoever asks for any port."""
    for _ in range(1000):
        port = _CHANCE.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")
