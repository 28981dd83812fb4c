"""What is told of an actor that died."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext  # type: ignore[import-untyped]
from ray.exceptions import ActorDiedError
from slime_launcher_ray.wait import Member

from slime_core.errors import TrainError

WHY = "The actor is dead because its worker process has died. Worker exit detail: connection error code 2. End of file"


@pytest.mark.parametrize(
    ("never_started", "rest"),
    [
        (True, "; it never ran, and what Ray's process for it printed is in /tmp/ray/session_latest/logs there"),
        (False, "; its log {log} ends with\nout of memory"),
    ],
)
def test_the_reason_is_told_whether_or_not_the_actor_ran(never_started: bool, rest: str, tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text("out of memory\n")
    said = f"{WHY}. Some common causes include: (1) the process was killed by the OOM killer."
    cause = ActorDiedErrorContext(error_message=said, never_started=never_started, actor_id=b"x" * 16)
    told = Member("trainer rank 0", None, TrainError, log).told(ActorDiedError(cause), "open")
    assert isinstance(told, TrainError)
    assert str(told) == f"trainer rank 0 died in open: {WHY}{rest.format(log=log)}"
