"""What an actor is around its stage, in this process."""

from __future__ import annotations

import logging
import socket
from typing import Any, cast

import pytest
from slime_launcher_ray.shell import Shell, _Shown
from torch.distributed import TCPStore

from slime_core import secrets
from slime_core.config import Args


def test_the_port_where_ranks_meet_is_nobody_elses_until_they_do() -> None:
    """Models are loaded between the choice and the meeting."""
    shell = Shell(cast(Any, None), "trainer rank 0")
    port = shell.free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("", port))
    assert TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False).port == port


def test_an_actors_log_shows_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    secrets.learn("", vars(Args(wandb_key="k-0123456789")))
    handler = logging.StreamHandler()
    handler.setFormatter(_Shown("%(name)s: %(message)s"))
    handler.handle(logging.makeLogRecord({"name": "slime_mine", "msg": "logs in with k-0123456789"}))
    assert capsys.readouterr().err == f"slime_mine: logs in with {secrets.MARK}\n"
