"""What a model wrote moves no cursor: every command that prints it spells control and format characters out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from slime_commands.eval.command import print_table

from slime_core.cli.main import main
from tests.made_run import MadeRun

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


def test_tables_fit_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    score = {"value": 0.5, "low": 0.4, "high": 0.6, "method": "wilson"}
    held = {"prompts": 1024, "samples_per_prompt": 16, "scores": {"reward": score, "majority@16": score}}
    print_table({"confidence": 0.95, "datasets": {"aime-2024": held, "gsm8k": held}})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("0.4000 to 0.6000" in line for line in lines) == 4, "a row is a line"
    for name, length in (("a", 200), ("b", 300)):
        path = MadeRun(tmp_path / name).write()
        with (path / "config.yaml").open("a") as file:
            file.write(f"eval_prompt_data: {'x' * length}  # flag\n")
    assert main(["runs", str(tmp_path)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "eval_prompt_data" in line]
    assert len(row) < 90
    assert row.count("x" * 27 + "...") == 2


def test_a_choice_of_samples_that_finds_none_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = MadeRun(tmp_path / "run").write()
    assert main(["samples", "show", str(path), "--rollout", "99"]) == 1
    err = capsys.readouterr().err
    assert "no sample of the run is like that; " in err
    assert "of rollouts 1 to 4 and of evaluations: --eval held" in err
