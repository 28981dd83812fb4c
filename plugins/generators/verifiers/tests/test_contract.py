from __future__ import annotations

import pytest

from slime_core import Sample
from slime_core.testing import HookPluginContract

pytest.importorskip("verifiers")


class TestHooks(HookPluginContract):
    component = "verifiers"


def test_rewards_and_metrics_become_means() -> None:
    from slime_generator_verifiers import hooks

    one = Sample(metadata={"verifiers": {"rewards": {"right": 1.0}, "metrics": {"turns": 2.0}}})
    two = Sample(metadata={"verifiers": {"rewards": {"right": 0.0}, "metrics": {"turns": None}}})
    metrics: dict[str, float] = {}
    hooks.slime_rollout_end(0, [[one, two], [Sample()]], metrics)
    assert metrics == {"verifiers/reward/right": 0.5, "verifiers/metric/turns": 2.0}
