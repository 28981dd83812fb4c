"""The dependency rules of docs/architecture.md, checked on the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.trees import CORE, LOCKSTEP, files, tree

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(p.parent for p in (ROOT / "plugins").glob("*/*/pyproject.toml"))
PUBLIC = {
    "slime_agent_base_url",
    "slime_environment_session",
    "slime_core",
    "slime_core.errors",
    "slime_core.models.config",
    "slime_core.ops",
    "slime_core.tools",
    "slime_core.types",
    "slime_core.waits",
    "slime_sandbox_local",
    "slime_trainer_megatron.families",
}


@pytest.mark.parametrize(
    "statement", ["import slime_core", "import slime_core; slime_core.Sample", "import slime_core.cli.main"]
)
def test_light_import(statement: str) -> None:
    heavy = ["torch", "transformers", "numpy", "ray", "pydantic", "fastapi"]
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


SINGLE = [p for p in PLUGINS if not {*p.iterdir()} & {*LOCKSTEP}]
INNER = {
    "slime_generator_verifiers": {"slime_agent_base_url.messages"},
}
"""What else a package imports, by package: each a name that ought to be public, or not to be needed."""


@pytest.mark.parametrize("plugin", SINGLE, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_plugins_use_the_public_api_and_no_other_plugin(plugin: Path) -> None:
    package = next(p for p in plugin.iterdir() if p.name.startswith("slime_"))
    names = {name for file in package.rglob("*.py") for name in _imports(file) if name.startswith("slime_")}
    foreign = {name for name in names if name.split(".")[0] != package.name and not name.startswith("slime_core.ops.")}
    assert foreign - PUBLIC - INNER.get(package.name, set()) == set()


def _component_names() -> set[str]:
    import tomllib

    names: set[str] = set()
    for path in [ROOT / "pyproject.toml", *(p / "pyproject.toml" for p in PLUGINS)]:
        groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        names |= {
            n
            for group, entries in groups.items()
            if group.startswith("slime.") and group != "slime.contracts"
            for n in entries
        }
    return names


def test_core_never_branches_on_a_component_name() -> None:
    # Also commands, hooks, learning rate schedules and attributes, for "sglang" and "megatron" a kind of teacher, for
    # "sglang" the shape of an answer and the key of a file, for "http" a URL's scheme, for "llama3" a scaling of
    # rotary positions, for "length" why an answer ended, for "tool_use" a block of Anthropic's messages: comparing
    # those words is no branch on a component.
    names = _component_names() - {
        "generate",
        "jsonl",
        "dataset",
        "sft",
        "constant",
        "sglang",
        "megatron",
        "http",
        "llama3",
        "length",
        "tool_use",
    }
    assert {"grpo", "reinforce_plus_plus", "fifo", "qwen3", "policy_loss", "embedded"} <= names
    found = []
    for file in CORE.rglob("*.py"):
        for node in ast.walk(tree(file)):
            if not isinstance(node, (ast.Compare, ast.Match)):
                continue
            for constant in ast.walk(node if isinstance(node, ast.Compare) else node.subject):
                if isinstance(constant, ast.Constant) and constant.value in names:
                    found.append(f"{file.relative_to(ROOT)}:{constant.lineno} {constant.value!r}")
    assert found == []


@pytest.mark.parametrize(
    "wanted",
    [
        ("slime_core", "slime_generator_multi_turn", "Dialogue"),
        ("slime_core.testing", "slime_testing_contracts", "RewardContract"),
    ],
)
def test_a_name_that_a_plugin_has_says_where(wanted: tuple[str, str, str]) -> None:
    old, new, name = wanted
    with pytest.raises(ImportError, match=rf"type: from {new} import {name}$"):
        exec(f"from {old} import {name}")


def test_core_imports_no_plugin_package() -> None:
    packages = {p.name for plugin in PLUGINS for p in plugin.iterdir() if p.name.startswith("slime_")}
    for file in CORE.rglob("*.py"):
        assert not {name.split(".")[0] for name in _imports(file)} & packages, file


SIZE_CEILING = 420


def test_no_module_grows_beyond_the_ceiling() -> None:
    sizes = {name: file.read_text(encoding="utf-8").count("\n") for file, name in files()}
    assert {name: n for name, n in sizes.items() if n > SIZE_CEILING} == {}


def test_no_module_is_named_for_nothing() -> None:
    bad = {"utils.py", "helpers.py", "misc.py", "common.py"}
    assert [name for file, name in files() if file.name in bad] == []
