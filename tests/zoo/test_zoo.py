"""Every bug of the zoo is named by the check and in the rollout that its entry says, and a sound run by none."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from slime_core.cli.main import main
from tests.zoo.bugs import BUGS, SOUND, Bug

NOT_CAUGHT_AFTER = 5
QUICK = {bug.check: bug for bug in reversed(BUGS) if bug.check and bug.after == 1}
"""One of each check; the rest are slow by their number."""


def _marked(bug: Bug) -> Any:
    slow = QUICK.get(bug.check) is not bug
    return pytest.param(bug, id=bug.name, marks=[pytest.mark.slow] if slow else [])


def incidents(run: Any) -> dict[str, int]:
    """Check -> rollout, counted from 1, in which it spoke."""
    file = run.run_dir / "incidents.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {found["check"]: found["rollout_id"] + 1 for found in map(json.loads, lines)}


@pytest.mark.parametrize("bug", [_marked(bug) for bug in BUGS])
def test_a_bug_is_named(bug: Bug, run_loop: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By `slime why --learning RUN`, in a line whose cause is this bug's."""
    bug.plant(monkeypatch)
    run = run_loop(steps=bug.after if bug.check else NOT_CAUGHT_AFTER, **bug.settings)
    capsys.readouterr()
    found, status = incidents(run), main(["why", "--learning", str(run.run_dir)])
    assert status == bool(found)
    printed = capsys.readouterr().out
    if bug.check is None:
        assert (found, printed.splitlines()[0]) == ({}, "no invariant was broken")
        assert bug.why
    else:
        assert found.get(bug.check) == bug.after, found
        (line,) = [line for line in printed.splitlines() if line.endswith(f"[{bug.check}]")]
        assert line.startswith(f"rollout {bug.after}: ")
        assert bug.says in line
        assert bug.says
        assert bug.after <= NOT_CAUGHT_AFTER


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in SOUND if n != "plain")])
def test_a_sound_run_is_not_accused(name: str, run_loop: Any) -> None:
    assert incidents(run_loop(steps=5, **SOUND[name])) == {}


def test_most_bugs_are_caught() -> None:
    assert len(BUGS) >= 60
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+ #\d+", bug.source) for bug in BUGS), "a bug that nobody reported"
    assert sum(bug.check is not None for bug in BUGS) >= 0.9 * len(BUGS)
    assert len({bug.name for bug in BUGS}) == len(BUGS)
