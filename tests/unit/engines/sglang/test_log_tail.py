from __future__ import annotations

from pathlib import Path

import pytest
from slime_engine_http.log_tail import LogTail


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


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
        "Error: Os { code: 98, kind: AddrInUse, message: \"Address already in use\" }",
        "RuntimeError: The server socket has failed to listen on any local network address. port: 1, EADDRINUSE",
    ],
)  # fmt: skip
def test_a_taken_port(tmp_path: Path, text: str) -> None:
    assert tail(tmp_path, text).address_in_use
    assert not tail(tmp_path, "ValueError: something else").address_in_use
