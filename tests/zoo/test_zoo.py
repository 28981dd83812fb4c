"""Every bug of the zoo is named by the check and in the rollout that its entry says, and a sound run by none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slime_command_inspect.learning import examine_run

from tests.zoo.bugs import BUGS, Bug

SOUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps": {"num_steps_per_rollout": 2},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "cold": {"rollout_temperature": 0.7},
    "long": {"rollout_max_response_len": 48, "calculate_per_token_loss": True},
    "ppo": {"advantage_estimator": "ppo", "num_steps_per_rollout": 2},
    "whitened": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    "unwhitened": {"advantage_estimator": "reinforce_plus_plus"},
    "cispo": {"advantage_estimator": "cispo"},
    "async": {"async_training": True},
    "entropy": {"entropy_coef": 0.01, "use_rollout_entropy": True},
}
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


@pytest.mark.parametrize("bug", map(_marked, BUGS))
def test_a_bug_is_named(bug: Bug, run_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    run = run_loop(steps=bug.after if bug.check else NOT_CAUGHT_AFTER, **bug.settings)
    found, (text, wrong) = incidents(run), examine_run(run.run_dir)
    assert wrong == bool(found)
    if bug.check is None:
        assert found == {}
        assert bug.why
    else:
        assert found.get(bug.check) == bug.after, found
        assert f"[{bug.check}]" in text
        assert bug.after <= NOT_CAUGHT_AFTER


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in SOUND if n != "plain")])
def test_a_sound_run_is_not_accused(name: str, run_loop: Any) -> None:
    assert incidents(run_loop(steps=5, **SOUND[name])) == {}


def test_most_bugs_are_caught() -> None:
    assert len(BUGS) >= 60
    assert sum(bug.check is not None for bug in BUGS) >= 0.9 * len(BUGS)
    assert len({bug.name for bug in BUGS}) == len(BUGS)
