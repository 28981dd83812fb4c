"""Mistakes that cost somebody a run: each is found before it, by the commands they would have typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slime_commands.check import check

from tests.conftest import Slime, TinyRun


def _found(capsys: pytest.CaptureFixture[str], argv: list[str], subject: str) -> list[tuple[str, str]]:
    check.run(["--json", *argv])
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(f["level"], f["message"]) for f in findings if f["subject"] == subject and f["level"] != "ok"]


@pytest.mark.slow
def test_sizes(tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"rollout_batch_size": 201, "num_rollout": 0}
    argv = tiny.argv(tmp_path / "run", **sizes)
    assert [level for level, _ in _found(capsys, argv, "length")] == ["warning"]
    ((level, message),) = _found(capsys, argv, "data")
    assert (level, "201 is more than the 200 rows" in message) == ("warning", True)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"input": "1+1=" * 1000, "label": "2"}) + "\n")
    argv = tiny.argv(tmp_path / "run", prompt_data=long, rollout_batch_size=1, num_steps_per_rollout=1)
    ((level, message),) = _found(capsys, argv, "data")
    assert (level, "--rollout-max-prompt-len N leaves longer ones out" in message) == ("error", True)


@pytest.mark.slow
def test_a_finished_run(tiny: TinyRun, tmp_path: Path, slime: Slime, capsys: pytest.CaptureFixture[str]) -> None:
    argv = tiny.argv(tmp_path / "run", num_rollout=1)
    slime("train", *argv)
    ((level, message),) = _found(capsys, [*argv, "--load", str(tmp_path / "run")], "length")
    assert (level, "1 are done, so nothing is left" in message) == ("warning", True)


@pytest.mark.slow
def test_memory(
    tiny: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_embedded.trainer.settings.main_memory", lambda: 1 << 20)
    argv = tiny.argv(tmp_path / "run", device="cpu")
    ((level, message),) = _found(capsys, argv, "memory")
    assert level == "error"
    assert message.startswith("weights, gradients and optimizer alone take 5.04 MiB, and this machine has 1 MiB")
