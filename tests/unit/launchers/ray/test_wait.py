"""What is told of an actor that died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext  # type: ignore[import-untyped]
from ray.exceptions import ActorDiedError
from slime_launcher_ray.wait import Member

from slime_core.errors import TrainError

WHY = "The actor is dead because its worker process has died. Worker exit detail: connection error code 2. End of file"


@pytest.mark.parametrize(
    ("never_started", "ip", "rest"),
    [
        (True, "10.0.0.1", "; it never ran; its log {logs}/worker-1-2-77.err ends with\nno such file"),
        (True, "10.0.0.2", "; it never ran, and what Ray's process for it printed is in {logs} there"),
        (False, "10.0.0.1", "; its log {log} ends with\nout of memory"),
    ],
)
def test_the_reason_is_told_whether_or_not_the_actor_ran(
    never_started: bool, ip: str, rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = SimpleNamespace(get_temp_dir=lambda: str(tmp_path), get_session_name=lambda: "session")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: ours)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    (logs := tmp_path / "session/logs").mkdir(parents=True)
    (logs / "worker-1-2-77.err").write_text("no such file\n")
    (log := tmp_path / "log").write_text("out of memory\n")
    said = f"{WHY}. Some common causes include: (1) the process was killed by the OOM killer."
    cause = ActorDiedErrorContext(error_message=said, never_started=never_started, actor_id=b"x" * 16,
                                  pid=77, node_ip_address=ip)  # fmt: skip
    told = Member("trainer rank 0", None, TrainError, log).told(ActorDiedError(cause), "open")
    assert isinstance(told, TrainError)
    assert str(told) == f"trainer rank 0 died in open: {WHY}{rest.format(log=log, logs=logs)}"
