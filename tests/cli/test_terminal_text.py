"""What a model wrote moves no cursor: every command that prints it spells control and format characters out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from slime_core.cli.main import main

BAD = "\x1b]0;owned\x07\x1b[2J\u202eevil\x9b31m"


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(list(argv))
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text), repr(text)
    return text


def test_rewards_and_their_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = tmp_path / "graded.py"
    reward.write_text("def reward(args, sample):\n    raise ValueError(sample.response)\n", encoding="utf-8")
    found = printed(capsys, "rewards", "score", "--with", str(reward), "--response", BAD, "--label", BAD)
    assert "\\x1b]0;owned\\x07" in found
    printed(capsys, "rewards", "attack", str(reward))


def test_warnings_and_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "\\x1b" in printed(capsys, "train", "--prompt-data", BAD, "--lr", BAD)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"input": 3, BAD: BAD}) + "\n", encoding="utf-8")
    printed(capsys, "check", "--prompt-data", str(data), "--hf-checkpoint", str(tmp_path), "--rollout-batch-size", "1")


def test_a_log_line_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    from slime_core.cli.main import _StandardError

    handler = _StandardError(logging.WARNING)
    handler.emit(logging.LogRecord("slime_reward_mine", logging.WARNING, "", 0, "it said %s", (BAD,), None))
    assert "\\x1b]0;owned\\x07" in capsys.readouterr().err
