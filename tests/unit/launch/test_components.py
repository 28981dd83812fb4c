"""What an estimator declares about itself is checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.load import load_settings
from slime_core.errors import ConfigError
from slime_core.launch.components import resolve_components

BASE = [
    "--hf-checkpoint", "/m", "--prompt-data", "p.jsonl", "--rm-type", "exact", "--num-rollout", "3",
    "--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16",
]  # fmt: skip


def test_a_setting_the_estimator_requires_is_named_with_its_flag() -> None:
    argv = [*BASE, "--advantage-estimator", "reinforce_plus_plus"]
    with pytest.raises(ConfigError, match=r"needs normalize_advantages = True.*type --normalize-advantages"):
        resolve_components(load_settings(argv, env={}))
    parts, _ = resolve_components(load_settings([*argv, "--normalize-advantages"], env={}))
    assert parts.estimator.requires == {"normalize_advantages": True}


def test_an_estimator_that_needs_a_critic_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "actor_critic.py"
    path.write_text(
        "from slime_core import EstimatorBase\n\n\nclass ActorCritic(EstimatorBase):\n    needs_values = True\n"
    )
    argv = [*BASE, "--advantage-estimator", f"{path}:ActorCritic"]
    with pytest.raises(ConfigError, match=r"ActorCritic.*needs values of a critic"):
        resolve_components(load_settings(argv, env={}))
