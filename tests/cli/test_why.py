"""`slime why` on boards of live, silent and dead processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
from slime_runs import board as board_module
from slime_runs.board import start_board, stop_board

from slime_core.cli.main import main
from slime_core.waits import progress, table, waiting


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(board_module, "_TICK", 0.01)
    monkeypatch.setattr(board_module, "_BETWEEN", 0.0)
    table.forget_all()  # what other tests of this process have left
    yield tmp_path
    stop_board()
    table.forget_all()


def _foreign(run_dir, name, heartbeat_age, **changes):
    (run_dir / "waits").mkdir(exist_ok=True)
    row = {"what": "broadcast", "age": 5.0, "deadline": 600.0, "then": "fails", "overdue": False, "queued": False,
           "waited": 0.0, "in": "thread", "number": 1}  # fmt: skip
    said = {"role": "rank 1", "host": "node9", "pid": 7, "birth": "", "heartbeat": time.time() - heartbeat_age,
            "waits": [row], "progress": {}, "left_off": 0}  # fmt: skip
    (run_dir / "waits" / f"{name}.json").write_text(json.dumps({**said, **changes}))
    return row


def test_a_live_run(run_dir, capsys) -> None:
    progress(rollout_id=12)
    with waiting("group 17", deadline=60.0, then="retried"), waiting("reward", deadline=9.0, then="fails"):
        start_board(run_dir, "rank 0")
        assert main(["why", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0  (pid")
    assert re.search(r"alive; rollout_id 12, \d+ s ago", lines[0])
    assert "of 60 s" in lines[1]
    assert lines[1].endswith("group 17; then: retried")
    assert lines[2].endswith("reward; then: fails")


def test_an_overdue_wait(run_dir, capsys) -> None:
    with waiting("weights", deadline=0.0, then="the run stops"):
        start_board(run_dir, "rank 0")
        assert main(["why", str(run_dir)]) == 3
    assert "OVERDUE  weights" in capsys.readouterr().out


def test_nothing_is_running(run_dir, capsys) -> None:
    assert main(["why", str(run_dir)]) == 2
    assert "no run has written there" in capsys.readouterr().err
    (run_dir / "waits").mkdir()
    assert main(["why", str(run_dir)]) == 1
    assert "nothing is running here" in capsys.readouterr().out
    (run_dir / "waits" / "node9-6.json").write_text('{"host": "node9", "pi')
    _foreign(run_dir, "node9-7", 500.0)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    host = board_module._host()
    row = _foreign(run_dir, f"{host}-{dead.pid}", 3.0, host=host, pid=dead.pid, role="rank 0")
    _foreign(run_dir, f"{host}-{dead.pid}", 3.0, host=host, pid=dead.pid, role="rank 0",
             waits=[{**row, "overdue": True}])  # fmt: skip
    assert main(["why", str(run_dir)]) == 1, "what a dead process waited for is not overdue"
    out = capsys.readouterr().out
    assert out.count("GONE") == 2
    assert out.count("ended without a word: SIGKILL, most often out of memory") == 2
    assert f"slime train --config {run_dir}/config.yaml --load {run_dir}" in out
    assert "was waiting for:" in out


def test_a_finished_run_is_told_why_it_did_not_learn(run_dir, capsys) -> None:
    rows = [{"step": step, "rollout/raw_reward": 0.1, "train/lr": 0.0} for step in range(1, 4)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["why", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "nothing is running here\nno invariant was broken\nreward 0.1 +- 0" in out
    assert "the learning rate is 0" in out
    assert main(["why", str(run_dir), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["learning"] == out.splitlines()[1:]


@pytest.mark.slow
def test_stacks(run_dir, capsys, monkeypatch) -> None:
    monkeypatch.setattr("slime_runs.inspect.why._STACKS_WITHIN", 2.0)
    monkeypatch.setattr(board_module, "_TICK", 0.01)
    _foreign(run_dir, "node9-7", 1.0)
    start_board(run_dir, "rank 0")
    assert main(["why", str(run_dir), "--stacks"]) == 0
    out = capsys.readouterr().out
    assert "test_why.py" in out
    assert "no answer within 2 s: even its board stands still" in out
    assert not list((run_dir / "waits").glob("*.ask"))


def test_json(run_dir, capsys) -> None:
    start_board(run_dir, "rank 0")
    (run_dir / "stalls").mkdir()
    (run_dir / "stalls" / "1.txt").write_text("x")
    assert main(["why", str(run_dir), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["alive"]
    assert not said["overdue"]
    assert said["processes"][0]["pid"] == os.getpid()
    assert said["stalls"] == [str(run_dir / "stalls" / "1.txt")]


def test_watch_ends_with_the_run(run_dir, capsys, monkeypatch) -> None:
    start_board(run_dir, "rank 0")
    monkeypatch.setattr("slime_runs.inspect.why.time.sleep", lambda seconds: stop_board())
    assert main(["why", str(run_dir), "--watch"]) == 1
    out = capsys.readouterr().out
    assert "rank 0" in out
    assert "nothing is running here" in out


def test_no_such_run(tmp_path, capsys) -> None:
    assert main(["why", str(tmp_path / "no")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_it_loads_nothing_heavy(tmp_path) -> None:
    code = (
        "import sys; from slime_core.cli.main import main; main(['why', sys.argv[1]]);"
        " print([m for m in ('torch', 'numpy', 'pydantic', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
