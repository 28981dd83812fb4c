from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
from slime_engine_http.incidents import Incidents
from slime_engine_http.log_tail import LogTail
from slime_runs.events import EventLog
from slime_runs.files import read_lines


def tail(tmp_path: Path, text: str, begin: int = 0) -> LogTail:
    (tmp_path / "log").write_text(text)
    return LogTail.of(tmp_path / "log", begin)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('Traceback (most recent call last):\n  File "x"\nValueError: no such model\n', "ValueError: no such model"),
        ("(Worker pid=1) ERROR 11-29 14:49:48 [x.py:1063] RuntimeError: a\n"
         "(APIServer pid=2) ERROR 11-29 14:49:52 [y.py:54] vllm.v1.engine.exceptions.EngineDeadError: above\n" * 2000
         + "(EngineCore pid=3) INFO 11-29 14:49:52 [z.py:1] ended\n", "RuntimeError: a"),
        ("usage: x\nlaunch_server.py: error: argument --dtype: invalid choice: 'f'\n",
         "launch_server.py: error: argument --dtype: invalid choice: 'f'"),
        ("thread 'main' panicked at x.rs:3: taken\nnote: run with\n", "thread 'main' panicked at x.rs:3: taken"),
        ("just words\nand more\n\n", "and more"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cause_is_the_last_line_that_names_an_error(tmp_path: Path, text: str, cause: str) -> None:
    assert tail(tmp_path, text).cause == cause


# -- what is counted, recorded and logged of an incident -------------------------------------------------


def test_told_three_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    incidents = Incidents(EventLog(tmp_path / "run"))
    incidents.tell("quarantined", "server 0", "http://h:1", "exited with status 1:\n  its log")
    incidents.tell("restarted", "server 0", "http://h:1", seconds=2.5)
    incidents.tell("restarted", "server 1", "http://h:2", seconds=1.25)
    assert caplog.messages[:2] == [
        "server 0 (http://h:1) quarantined: exited with status 1:",
        "server 0 (http://h:1) restarted after 2.5 s",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    first, second, _ = list(read_lines(tmp_path / "run" / "events.jsonl"))
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "event": "quarantined", "engine": "server 0", "url": "http://h:1", "reason": "exited with status 1:\n  its log",
    }  # fmt: skip
    assert second == {"event": "restarted", "engine": "server 0", "url": "http://h:1", "reason": "", "seconds": 2.5}
    metrics = {"engine/restarts": 2, "engine/router_restarts": 0, "engine/quarantined": 1, "engine/recovery_time": 2.5}
    assert incidents.take_metrics() == metrics
    assert incidents.take_metrics() == dict.fromkeys(metrics, 0.0)


def test_a_record_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventLog, "write", full)
    incidents = Incidents(EventLog(tmp_path))
    for _ in range(2):
        incidents.tell("quarantined", "server 0", "http://h:1", "gone")
    assert [m for m in caplog.messages if "No space left" in m] == [
        "the record of engine events cannot be written: [Errno 28] No space left on device"
    ]
    assert incidents.take_metrics()["engine/quarantined"] == 2
