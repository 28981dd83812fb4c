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
        ("[2026-11-20 17:57:35] RuntimeError: a\nlater words\n", "RuntimeError: a"),
        ("(Worker pid=1) ERROR 11-29 14:49:48 [x.py:1063] RuntimeError: a\n"
         "(APIServer pid=2) ERROR 11-29 14:49:52 [y.py:54] vllm.v1.engine.exceptions.EngineDeadError: above\n" * 2000
         + "(EngineCore pid=3) INFO 11-29 14:49:52 [z.py:1] ended\n", "RuntimeError: a"),
        ("usage: x\nlaunch_server.py: error: argument --dtype: invalid choice: 'f'\n",
         "launch_server.py: error: argument --dtype: invalid choice: 'f'"),
        ("torch.OutOfMemoryError: CUDA out of memory\nKilled\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("thread 'main' panicked at x.rs:3: taken\nnote: run with\n", "thread 'main' panicked at x.rs:3: taken"),
        ("KeyError: 1\n\nDuring handling...\n\nTypeError: 2\n", "TypeError: 2"),
        ("just words\nand more\n\n", "and more"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_cause_is_the_last_line_that_names_an_error(tmp_path: Path, text: str, cause: str) -> None:
    assert tail(tmp_path, text).cause == cause


def test_the_cause_comes_first_and_long_lines_are_cut(tmp_path: Path) -> None:
    text = "ValueError: bad\n" + "\n".join(f"line {i}" for i in range(50)) + "\n" + "x" * 1000 + "\n"
    lines = tail(tmp_path, text).describe(5).splitlines()
    assert lines[0] == "ValueError: bad"
    assert lines[1] == f"  last lines of {tmp_path / 'log'}:"
    assert [line.strip() for line in lines[2:6]] == ["line 46", "line 47", "line 48", "line 49"]
    assert lines[6].strip() == "x" * 300 + "..."
    assert len(lines) == 7


def test_only_what_was_written_since(tmp_path: Path) -> None:
    assert tail(tmp_path, "KeyError: old\nnew\n", begin=14).lines == ("new",)


def test_a_log_that_says_nothing_or_is_not_there(tmp_path: Path) -> None:
    assert tail(tmp_path, "\n").describe() == f"it wrote nothing to {tmp_path / 'log'}"
    assert LogTail.of(tmp_path / "none").lines == ()


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


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    found = tail(tmp_path, "".join(f"{i}\n" for i in range(50_000)))
    assert found.lines[-1] == "49999"
    assert len(found.lines) < 20_000


def test_the_end_alone_quotes_no_error_as_the_cause(tmp_path: Path) -> None:
    assert tail(tmp_path, "ValueError: harmless\nlater\n").end(1) == f"last lines of {tmp_path / 'log'}:\n    later"
    assert tail(tmp_path, "").end() == f"it wrote nothing to {tmp_path / 'log'}"
