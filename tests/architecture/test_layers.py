"""The dependency rules of docs/internals/architecture.md, checked on the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.trees import CORE, LOCKSTEP, called, files, nodes
from tests.sweeps import sweep

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(p.parent for depth in ("*", "*/*") for p in (ROOT / "plugins").glob(f"{depth}/pyproject.toml"))
PACKAGES = {p.name: p for plugin in PLUGINS for p in plugin.iterdir() if p.name.startswith("slime_")}
PUBLIC = (
    "slime_core",
    "slime_core.errors",
    "slime_core.models.config",
    "slime_core.ops",
    "slime_core.tools",
    "slime_core.sample",
    "slime_core.waits",
)


@pytest.mark.parametrize(
    "statement", ["import slime_core", "import slime_core; slime_core.Sample", "import slime_core.cli.main"]
)
def test_light_import(statement: str) -> None:
    heavy = ["torch", "transformers", "numpy", "ray", "pydantic", "fastapi"]
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def _imports(path: Path) -> dict[str, set[str]]:
    """Module -> names taken from it."""
    found: dict[str, set[str]] = {}
    for plain in nodes(path, ast.Import):
        for alias in plain.names:
            found.setdefault(alias.name, set())
    for node in nodes(path, ast.ImportFrom):
        if node.module:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def _exported(module: str) -> set[str]:
    """Return `__all__` of a plugin's module, or an empty set without one."""
    package, *inner = module.split(".")
    place = PACKAGES[package].joinpath(*inner)
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in nodes(path, ast.Assign):
        if [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


COPIED = [package for package in PACKAGES.values() if package not in LOCKSTEP]


@sweep("package", COPIED)
def test_what_strangers_copy_uses_public_names(package: Path) -> None:
    for file in (file for file in package.rglob("*.py") if not {*file.parents} & {*LOCKSTEP}):
        for module, names in _imports(file).items():
            top = module.split(".")[0]
            if top == "slime_core":
                assert module in PUBLIC or module.startswith("slime_core.ops."), f"{file} imports {module}"
            elif top in PACKAGES and top != package.name:
                assert names, f"{file} imports {module}; write: from {module} import ..."
                inner = names - _exported(module)
                assert not inner, f"{file} imports {sorted(inner)} of {module}, which are not in its __all__"


def _component_names() -> set[str]:
    import tomllib

    names: set[str] = set()
    for path in [ROOT / "pyproject.toml", *(p / "pyproject.toml" for p in PLUGINS)]:
        groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
        groups.pop("slime.contracts", None)  # its names are kinds, as those of the next
        for group in ("slime.signatures", "slime.api", "slime.data", "slime.failures", "slime.metrics"):
            groups.pop(group, None)
        groups.pop("slime.commands", None)  # its names are words like rewards and tokens
        names |= {n for group, entries in groups.items() if group.startswith("slime.") for n in entries}
    return names


def test_core_never_branches_on_a_component_name() -> None:
    # Also a command, a learning rate schedule, a scaling of rotary positions, an attribute, and where a reward is
    # called: comparing those words is no branch on a component.
    names = _component_names() - {"sft", "constant", "llama3", "dataset", "inline"}
    assert {"grpo", "reinforce_plus_plus", "fifo", "qwen3", "policy_loss", "embedded"} <= names
    found = []
    for file in CORE.rglob("*.py"):
        for node in (*nodes(file, ast.Compare), *nodes(file, ast.Match)):
            for constant in ast.walk(node if isinstance(node, ast.Compare) else node.subject):
                if isinstance(constant, ast.Constant) and constant.value in names:
                    found.append(f"{file.relative_to(ROOT)}:{constant.lineno} {constant.value!r}")
    assert found == []


def test_a_name_that_a_plugin_has_says_where() -> None:
    with pytest.raises(ImportError, match=r"type: from slime_environments.session import Dialogue$"):
        exec("from slime_core import Dialogue")


def test_core_imports_no_plugin_package() -> None:
    for file in CORE.rglob("*.py"):
        assert not {name.split(".")[0] for name in _imports(file)} & PACKAGES.keys(), file


def _imported_modules(file: Path, modules: set[str]) -> set[str]:
    """Return the modules of the core that a file imports, inside functions too, but not for the type checker alone."""
    typing = {
        node
        for block in nodes(file, ast.If)
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = {alias.name for node in nodes(file, ast.Import) if node not in typing for alias in node.names}
    for node in nodes(file, ast.ImportFrom):
        if node not in typing:
            found |= {
                n if (n := f"{node.module}.{alias.name}") in modules else str(node.module) for alias in node.names
            }
    return found & modules


def test_the_core_has_no_import_cycle() -> None:
    places = {file: file.relative_to(ROOT).with_suffix("").parts for file in CORE.rglob("*.py")}
    modules = {".".join(parts).removesuffix(".__init__"): file for file, parts in places.items()}
    graph = {name: _imported_modules(file, modules.keys() - {name}) for name, file in modules.items()}
    TopologicalSorter(graph).prepare()


def test_no_module_is_named_for_nothing() -> None:
    bad = {"utils.py", "helpers.py", "misc.py", "common.py"}
    assert [name for file, name in files() if file.name in bad] == []


def test_there_is_one_http_front() -> None:
    """One place makes applications, and one has the paths of OpenAI's and Anthropic's APIs."""
    applications, paths = set(), set()
    theirs = re.compile(r"/v1/(chat|completions|responses|messages)")
    for file, name in files():
        if any(called(call) in ("FastAPI", "APIRouter", "Config") for call in nodes(file, ast.Call)):
            applications.add(name)
        if any(theirs.match(str(constant.value)) for constant in nodes(file, ast.Constant)):
            paths.add(name)
    assert applications == {"slime_serving/http/application.py"}
    assert paths == {"slime_serving/front/app.py"}
