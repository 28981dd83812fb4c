"""The table of `benchmarks/algorithms.py`; the runs it is made of are the demo's."""

from __future__ import annotations

from types import ModuleType

import pytest

from slime_core.plugins.manager import current_registry
from tests.scripts import load_script


@pytest.fixture
def script() -> ModuleType:
    return load_script("benchmarks/algorithms.py")


def test_ratios_are_against_the_reference_of_the_same_call(script: ModuleType) -> None:
    runs = [
        script.Run("grpo", 0, 0.0, 0.8, 20.0),
        script.Run("rloo", 0, 0.0, 0.9, 30.0),
        script.Run("grpo", 1, 0.2, 1.0, 20.0),
        script.Run("rloo", 1, 0.2, 0.45, 10.0),
    ]
    assert script.markdown(runs).splitlines()[2:] == [
        "| `grpo` | 0.100 | 0.900 (0.800) | 1.00 | 20.0 | 1.00 |",
        "| `rloo` | 0.100 | 0.675 (0.450) | 0.75 | 20.0 | 1.00 |",
    ]
    assert script.markdown(runs[1:2]).splitlines()[2] == "| `rloo` | 0.000 | 0.900 (0.900) | - | 30.0 | - |"


def test_what_did_not_learn_is_named(script: ModuleType) -> None:
    runs = [script.Run("grpo", 0, 0.0, 0.9, 1.0), script.Run("rloo", 0, 0.1, 0.25, 1.0)]
    assert script.unlearned(runs) == ["rloo"]


def test_every_installed_estimator_takes_part_and_so_do_losses(script: ModuleType) -> None:
    names = script.installed_algorithms()
    assert names[0] == "grpo"
    assert set(current_registry().names("estimators")) == set(names) - {"clip_cov", "kl_cov"}
