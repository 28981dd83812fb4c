"""Whatever ends a command, nothing is left of the cluster that it started itself: actors, reward workers, daemons."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.checkpoint.store import find, read_state
from tests.backends.whole_runs import Run, running
from tests.conftest import SLIME, TinyRun

pytestmark = [pytest.mark.backends, pytest.mark.timeout(600)]

_PLENTY = 10_000
_GONE_S = 40.0
"""For all to be gone; what is left to itself stays for a minute and more."""


@pytest.fixture
def started(tiny: TinyRun, tmp_path: Path):  # type: ignore[no-untyped-def]
    argv = [SLIME, "train", *tiny.argv(tmp_path / "run", num_rollout=_PLENTY, eval_interval=None), "--launcher", "ray"]
    with running(argv, tmp_path, tmp_path / "log") as run:
        run.until("rollout 2/")
        run.note()
        assert len(run.processes) > 5, "the cluster is below the command"
        yield run


def _signal(run: Run, number: int, kill: Callable[[int, int], None] = os.kill) -> int:
    kill(run.pid, number)
    return run.fail(120)


def test_interrupt(started: Run) -> None:
    assert _signal(started, signal.SIGINT) == 130
    assert started.left(_GONE_S) == []
    assert "Traceback" not in started.said()


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["the command", "its process group"])
def test_a_scheduler_asks_it_to_end(started: Run, tmp_path: Path, kill: Callable[[int, int], None]) -> None:
    assert _signal(started, signal.SIGTERM, kill) == 0, started.said()
    assert started.left(_GONE_S) == []
    done = json.loads((tmp_path / "run" / "summary.json").read_text())["rollouts"]
    assert 2 <= done < _PLENTY
    commit = find(tmp_path / "run")  # the second one of its rollout, where the next was being generated
    assert commit is not None
    assert read_state(commit)["rollout_id"] == done - 1


def test_killed(started: Run) -> None:
    started.kill()
    assert started.left(_GONE_S) == []  # agents of Ray look for their parent now and then: the keeper ends them
