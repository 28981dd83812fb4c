"""The core's own components, held to the contract of their kind; those of `plugins/` are held to it beside them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts import Contract, suite_of

from slime_core.plugins.kinds import HOOK_GROUP, KINDS, function_flags
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import ComponentRef
from slime_core.plugins.resolve import resolve
from tests.architecture.trees import LOCKSTEP

PLUGINS = Path(__file__).parents[2] / "plugins"
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("rollouts", "sft"): {"args": {"n_samples_per_prompt": 1}},
}
"""What a subclass would set, of components that need more than their name."""
SLOW = {("trainers", "megatron")}
ELSEWHERE = {
    ("losses", "custom_loss"), ("engines", "http"), ("engines", "sglang"), ("engines", "vllm"),
    ("models", "llava"), ("models", "qwen2_vl"), ("models", "qwen2_5_vl"), ("models", "qwen3_vl"),
}  # fmt: skip
"""Held by `test_policy_loss_parts.py`, `test_http_engine.py` and the conformance tests of `tests/backends`, which have
the settings they cannot do without, or a service to talk to; the models by their tests, which give them images."""
HERE = ("slime_core", *sorted({package.name for package in LOCKSTEP if package.name.startswith("slime_")}))
COMPONENTS = [
    current_registry().get(kind, name) for kind in [*KINDS, HOOK_GROUP] for name in current_registry().names(kind)
]


def _package(ref: ComponentRef) -> str:
    return ref.target.split(":")[0].split(".")[0]


def _suites() -> dict[str, type[Contract]]:
    """Return one contract class per component, as a plugin's author would write it."""
    found, suite_for = {}, functools.cache(suite_of)  # it reads the metadata of every distribution
    for ref in COMPONENTS:
        key = (ref.kind, ref.name)
        if _package(ref) in HERE and key not in ELSEWHERE:
            name = f"Test_{ref.kind.replace('.', '_')}_{ref.name}"
            facts = {"kind": ref.kind, "component": ref.name, **SETTINGS.get(key, {})}
            suite = type(name, (suite_for(str(facts["kind"])),), facts)
            found[name] = pytest.mark.slow(suite) if key in SLOW else suite
    return found


globals().update(_suites())


def test_components_of_plugins_are_held_to_their_contract_beside_them() -> None:
    theirs = [ref for ref in COMPONENTS if _package(ref) not in HERE and (ref.kind, ref.name) not in ELSEWHERE]
    assert len(theirs) > 60
    missing = []
    for package in {_package(ref) for ref in theirs}:
        (folder,) = {path.parent for path in (*PLUGINS.glob(f"*/{package}"), *PLUGINS.glob(f"*/*/{package}"))}
        suites = "".join(file.read_text(encoding="utf-8") for file in folder.glob("tests/test_*.py"))
        held = set(re.findall(r'component = "(\w+)"', suites))
        whole = set(re.findall(rf'suites\("([\w.]+)", "{package}"', suites))
        skipped = set(re.findall(r'"(\w+)": None', suites))
        for ref in (ref for ref in theirs if _package(ref) == package):
            if ref.name not in held and (ref.kind not in whole or ref.name in skipped):
                missing.append(f"{ref.kind}/{ref.name}")
    assert missing == []


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_component_resolves(kind: str) -> None:
    for name in current_registry().names(kind):
        resolved = resolve(kind, name)
        assert resolved.ref.provenance()["sha256"], f"{kind}/{name} has no source file"


def test_every_kind_has_a_suite() -> None:
    kinds = [*(kind for kind in KINDS if kind != "functions"), *function_flags(), HOOK_GROUP]
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
    assert {"inline", "ray"} <= names["launchers"]
    assert {"convert", "engines", "plan", "serve", "submit"} <= names["commands"]
    assert {"llama", "qwen2", "qwen3", "qwen3_moe"} <= names["models"]
    assert {"llama", "mimo", "qwen2", "qwen3", "qwen3_moe"} <= names["megatron_models"]
