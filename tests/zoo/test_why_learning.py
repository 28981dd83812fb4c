"""`slime why --learning` prints what a run noticed, and the causes that its metrics support."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slime_command_inspect.learning import describe_learning
from slime_runs import Run

from tests.zoo.bugs import BUGS


@pytest.mark.slow
def test_it_names_the_planted_cause(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(bug for bug in BUGS if bug.name == "always_right")
    bug.plant(monkeypatch)
    text = describe_learning(Run(run_loop(steps=bug.after, **bug.settings).run_dir))
    assert "[samples_carry_gradient]" in text
    assert "no variance in groups" in text
    assert "the grader gives the same mean 1 every time" in text


def test_it_says_that_nothing_was_noticed(run_loop: Any) -> None:
    text = describe_learning(Run(run_loop(steps=2).run_dir))
    assert text.startswith("no invariant was broken\nreward ")


@pytest.mark.slow
def test_doctor_names_what_is_wrong_with_a_run(run_loop: Any, slime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted cause; then damage, with what to type; a sound run has neither."""
    sound = slime("doctor", run_loop(steps=2).run_dir)
    assert sound.stdout.startswith("no invariant was broken")
    bug = next(bug for bug in BUGS if bug.name == "always_right")
    bug.plant(monkeypatch)
    run_dir = run_loop(steps=bug.after, **bug.settings).run_dir
    done = slime("doctor", run_dir, check=False)
    assert done.returncode == 1
    assert "[samples_carry_gradient]" in done.stdout
    found = json.loads(slime("doctor", run_dir, "--json", check=False).stdout)
    assert (found["wrong"], found["lines"]) == (True, done.stdout.splitlines())
    refused = slime("doctor", run_dir, "--no-plugins", check=False)
    assert (refused.returncode, "loads no plugin" in refused.stderr) == (2, True)
    state = max((run_dir / "checkpoints").glob("rollout_*")) / "state.json"
    state.write_text(state.read_text().replace("0", "1"))
    done = slime("doctor", run_dir, check=False)
    assert f"torn: {state.name}" in done.stdout
    assert done.returncode == 1
    missing = slime("doctor", run_dir / "nowhere", check=False)
    assert (missing.returncode, "no such directory" in missing.stderr) == (2, True)
