from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from slime_engine_http.ports import reserve

from slime_core.errors import EngineError


@contextmanager
def listening(port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """As servers bind: with SO_REUSEADDR."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()
        yield made


def test_a_server_listens_beside_the_reservation_and_so_does_its_successor() -> None:
    with reserve() as block:
        for _ in range(2):
            with listening(block[0]), socket.create_connection(("127.0.0.1", block[0]), timeout=5):
                pass
        with listening(block[0], "0.0.0.0"):
            pass


def test_nobody_else_reserves_the_same_port_listening_or_not() -> None:
    with reserve() as block:
        with pytest.raises(EngineError, match=f"port {block[0]} is taken"):
            reserve(first=block[0])
        with listening(block[0]), pytest.raises(EngineError, match="is taken"):
            reserve(first=block[0])
        number = block[0]
    with reserve(first=number) as again:
        assert again[0] == number


def test_another_process_cannot_reserve_it_either() -> None:
    code = "import sys; from slime_engine_http.ports import reserve; reserve(first=int(sys.argv[1]))"
    with reserve() as block:
        done = subprocess.run([sys.executable, "-c", code, str(block[0])], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"port {block[0]} is taken" in done.stderr


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(EngineError, match=rf"port {port}: allowed are 1 to 65535"):
        reserve(first=port)
