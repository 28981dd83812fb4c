"""Every component that is installed or in the checkout, held to the contract of its kind."""

from __future__ import annotations

import pytest

from slime_core.plugins.kinds import KINDS
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from slime_core.testing import (
    BufferContract,
    Contract,
    EstimatorContract,
    FilterContract,
    GeneratorContract,
    ModelContract,
    RewardContract,
)

SUITES = (RewardContract, GeneratorContract, BufferContract, FilterContract, EstimatorContract, ModelContract)


def _suites() -> dict[str, type[Contract]]:
    """One subclass per component, as a plugin's author would write it."""
    return {
        f"Test_{suite.kind}_{name}": type(f"Test_{suite.kind}_{name}", (suite,), {"component": name})
        for suite in SUITES
        for name in current_registry().names(suite.kind)
    }


globals().update(_suites())


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_component_resolves(kind: str) -> None:
    for name in current_registry().names(kind):
        resolved = resolve(kind, name)
        assert resolved.provenance()["sha256"], f"{kind}/{name} has no source file"


def test_the_built_ins_are_here() -> None:
    names = {kind: set(current_registry().names(kind)) for kind in KINDS}
    assert {"exact", "math", "f1"} <= names["rewards"]
    assert {"single_turn", "tool_use"} <= names["generators"]
    assert "fifo" in names["buffers"]
    assert "nonzero_std" in names["filters"]
    assert {"grpo", "reinforce_plus_plus"} <= names["estimators"]
    assert {"llama", "qwen2", "qwen3"} <= names["models"]
