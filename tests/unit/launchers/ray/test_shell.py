"""What an actor is around its stage, in this process."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
from slime_launcher_ray.shell import Shell
from torch.distributed import TCPStore


def test_the_port_where_ranks_meet_is_nobody_elses_until_they_do() -> None:
    """Models are loaded between the choice and the meeting."""
    shell = Shell(cast(Any, None), "trainer rank 0")
    port = shell.free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("", port))
    assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port
