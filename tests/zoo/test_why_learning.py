"""`slime why --learning` prints what a run noticed, and the causes that its metrics support."""

from __future__ import annotations

from typing import Any

import pytest
from slime_command_inspect.learning import describe_learning

from tests.zoo.bugs import BUGS


@pytest.mark.slow
def test_it_names_the_planted_cause(run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = next(bug for bug in BUGS if bug.name == "always_right")
    bug.plant(monkeypatch)
    text = describe_learning(run_loop(steps=bug.after, **bug.settings).run_dir)
    assert "[samples_carry_gradient]" in text
    assert "no variance in groups" in text
    assert "the grader gives the same mean 1 every time" in text


def test_it_says_that_nothing_was_noticed(run_loop: Any) -> None:
    text = describe_learning(run_loop(steps=2).run_dir)
    assert text.startswith("no invariant was broken\nreward ")
