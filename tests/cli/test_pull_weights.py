"""`slime pull-weights`: what it says when it cannot begin (what it does: tests/integration/test_weight_delta.py)."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.conftest import Slime


def test_a_port_that_is_taken(slime: Slime, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = slime("pull-weights", "--source", tmp_path, "--local-dir", tmp_path / "l", "--port", port, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "choose another --port" in done.stderr


def test_arguments_that_make_no_sense(slime: Slime, tmp_path: Path) -> None:
    base = ("pull-weights", "--source", tmp_path, "--local-dir", tmp_path / "l")
    for flags, message in (
        (("--engine-url", "localhost:30000"), "expected http://HOST:PORT"),
        (("--timeout", "0"), "expected seconds"),
    ):
        done = slime(*base, *flags, check=False)
        assert done.returncode == 2
        assert message in done.stderr
