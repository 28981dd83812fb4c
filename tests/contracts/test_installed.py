"""Every component that is installed or in the checkout, held to the contract of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.plugins.kinds import HOOK_GROUP, KINDS
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from slime_core.testing import Contract, suite_of

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("rollouts", "sft"): {"args": {"n_samples_per_prompt": 1}},
}
"""What a subclass would set, of components that need more than their name."""

ELSEWHERE = {
    **{
        ("rewards", name): "plugins/rewards/*/tests/test_*.py"
        for name in ("on_policy_distillation", "remote", "remote_rm", "llm_judge", "length_penalty", "weighted_sum")
    },
    ("losses", "custom_loss"): "tests/contracts/test_policy_loss_parts.py",
    **{
        ("megatron_models", name): f"plugins/models/{name}/tests/test_contract.py"
        for name in ("deepseek_v3", "glm4", "glm4_moe_lite", "kimi_k2", "mimo", "qwen3_next")
    },
    **{
        ("generators", name): f"plugins/generators/{name}/tests/test_contract.py"
        for name in ("agent", "best_of_n", "multi_agent", "search", "self_consistency")
    },
    ("generators", "verifiers"): "plugins/generators/verifiers/tests/test_verifiers.py",
    ("data_sources", "verifiers"): "plugins/generators/verifiers/tests/test_verifiers.py",
    **{
        ("models", name): "plugins/models/vision_language/tests/test_contract.py"
        for name in ("llava", "qwen2_vl", "qwen2_5_vl")
    },
    ("tool_parsers", "plain"): "plugins/tool_parsers/families/tests/test_contract.py",
    ("generators", "multi_turn"): "plugins/generators/multi_turn/tests/test_contract.py",
    ("rewards", "reasoning_gym"): "plugins/environments/reasoning_gym/tests/test_contract.py",
    ("environments", "reasoning_gym"): "plugins/environments/reasoning_gym/tests/test_contract.py",
    ("environments", "openenv"): "plugins/environments/openenv/tests/test_contract.py",
    ("engines", "http"): "tests/contracts/test_http_engine.py",
    ("engines", "sglang"): "tests/backends/test_engine_conformance.py",
    ("reward_post_processes", "on_policy_distillation"): "tests/contracts/test_examples.py",
}
"""Held to the contract by tests which have the settings they cannot do without, or a service to talk to."""


def _suites() -> dict[str, type[Contract]]:
    """One subclass per component, as a plugin's author would write it."""
    found = {}
    for kind in [*KINDS, HOOK_GROUP]:
        for component in current_registry().names(kind):
            if (kind, component) not in ELSEWHERE:
                name = f"Test_{kind.replace('.', '_')}_{component}"
                facts = {"kind": kind, "component": component, **SETTINGS.get((kind, component), {})}
                found[name] = type(name, (suite_of(kind),), facts)
    return found


globals().update(_suites())


@pytest.mark.parametrize(("kind", "name"), sorted(ELSEWHERE))
def test_those_held_elsewhere_are(kind: str, name: str) -> None:
    files = Path(__file__).parents[2].glob(ELSEWHERE[kind, name])
    assert any(f'"{name}"' in file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_component_resolves(kind: str) -> None:
    for name in current_registry().names(kind):
        resolved = resolve(kind, name)
        assert resolved.provenance()["sha256"], f"{kind}/{name} has no source file"


def test_every_kind_has_a_suite() -> None:
    kinds = [*(kind for kind in KINDS if kind != "functions"), HOOK_GROUP]
    assert {kind: suite_of(kind).kind for kind in kinds} == {kind: kind for kind in kinds}
    assert suite_of("functions") is Contract


def test_the_built_ins_are_here() -> None:
    names = {kind: set(current_registry().names(kind)) for kind in KINDS}
    assert {"exact", "math", "f1"} <= names["rewards"]
    assert {"single_turn", "tool_use"} <= names["generators"]
    assert "fifo" in names["buffers"]
    assert "nonzero_std" in names["filters"]
    assert {
        "grpo", "dr_grpo", "gspo", "cispo", "dapo", "rloo", "remax", "max_rl", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    } <= names["estimators"]  # fmt: skip
    assert {"llama", "qwen2", "qwen3", "qwen3_moe"} <= names["models"]
    assert {"llama", "mimo", "qwen2", "qwen3", "qwen3_moe"} <= names["megatron_models"]
