"""What `slime plugins new` writes, for every kind: it passes its tests as it is, and is typed and tidy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from slime_commands.plugins.scaffold import _TOO_LARGE, plan, template_kinds, write
from trove_classifiers import classifiers

import slime_core
from slime_core import Step
from slime_core.errors import ConfigError, PluginConflictError, PluginNotFoundError
from slime_core.plugins.kinds import KINDS, function_flags
from slime_core.plugins.manager import current_registry
from slime_core.plugins.registry import ComponentRef, Registry
from tests.conftest import Slime

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One distribution per kind; kinds that share an entry-point group share its names."""
    directory = tmp_path_factory.mktemp("scaffold")
    for kind in template_kinds():
        write(plan(kind, f"acme_{kind}" if kind in function_flags() else "acme_thing2", directory, Registry()))
    return directory


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_has_a_template_or_a_reason() -> None:
    assert set(template_kinds()) - {"hooks"} == {*KINDS, *function_flags()} - set(_TOO_LARGE)


@pytest.mark.slow
def test_the_tests_of_every_kind_pass_at_once(made: Path, program: Slime) -> None:
    assert len(list(made.glob("*/pyproject.toml"))) == len(template_kinds())
    passes(made, program)


def passes(folder: Path, program: Slime) -> None:
    """Run the contract tests of every distribution in a folder."""
    tests = [path.parent / "tests" / "test_contract.py" for path in sorted(folder.glob("*/pyproject.toml"))]
    flags = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={folder}", "-c", os.devnull]
    done = program("pytest", *flags, *tests, cwd=folder, SLIME_PLUGIN_DIR=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_right_number_of_an_environment_may_be_any(tmp_path: Path) -> None:
    made = plan("environments", "world", tmp_path, Registry())
    text = made.files["tests/test_contract.py"]
    for number in (1, 2, 20):
        steps = [Step("higher") for _ in range(1, number)] + [Step(reward=1.0, done=True)]
        spaces: dict[str, Any] = {}
        exec(compile(text, "test_contract.py", "exec", dont_inherit=True), spaces)
        suite = spaces["TestWorld"]()
        suite.play = lambda actions, steps=steps: ("Guess.", steps)
        suite.test_the_right_number_is_rewarded()


def test_they_are_tidy(made: Path) -> None:
    run(BIN / "ruff", "check", ".", cwd=made)
    run(BIN / "ruff", "format", "--check", ".", cwd=made)


@pytest.mark.slow
def test_they_are_typed(made: Path) -> None:
    packages = sorted(str(path.parent) for path in made.glob("*/slime_*/py.typed"))
    assert len(packages) == len(template_kinds())
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    run(BIN / "mypy", config, "--strict", *packages, cwd=ROOT)


def test_the_project_file_says_what_installers_and_slime_need(made: Path) -> None:
    folder = made / "slime-reward-acme-thing2"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == folder.name
    assert project["entry-points"] == {"slime.rewards": {"acme_thing2": "slime_reward_acme_thing2:reward"}}
    assert project["dependencies"] == [f"slime-rl-core>={slime_core.__version__}"]
    assert project["optional-dependencies"] == {"test": [f"slime-rl[dev]>={slime_core.__version__}"]}
    assert (project["license"], project["keywords"]) == ("Apache-2.0", ["slime-plugin"])
    assert set(project["classifiers"]) <= classifiers
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "\nslime_api = 1\n" in (folder / "slime_reward_acme_thing2" / "__init__.py").read_text()
    assert (folder / "slime_reward_acme_thing2" / "py.typed").is_file()
    assert "--rm-type acme_thing2" in (folder / "README.md").read_text()


def test_workflows_pin_each_action_and_publish_without_a_password(made: Path, tmp_path: Path) -> None:
    workflows = made / "slime-reward-acme-thing2/.github/workflows"
    for name, jobs in (("ci.yml", {"check"}), ("publish.yml", {"build", "publish"})):
        text = (workflows / name).read_text()
        read = yaml.safe_load(text)
        assert read["jobs"].keys() == jobs
        for job in read["jobs"].values():
            assert job["timeout-minutes"]
            assert all(
                re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{40 * '0'}"))
                for step in job["steps"]
            )
        assert len(re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", text, re.MULTILINE)) == text.count("uses: ")
        assert "secrets." not in text
    assert read["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert read["jobs"]["build"]["permissions"] == {"contents": "read"}
    (command,) = [step["run"] for step in read["jobs"]["build"]["steps"] if step.get("run", "").startswith("ls ")]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/slime_reward_acme_thing2-0.1.0-py3-none-any.whl").touch()
    for tag, status in (("v0.1.0", 0), ("v0.2.0", 2)):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "GITHUB_REF_NAME": tag})
        assert done.returncode == status


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My-Reward", "; my_reward would do"),
        ("2fast", ""),
        ("a.b", "; a_b would do"),
        ("class", ""),
        ("a__b", "; a_b would do"),
        ("tail_", "; tail would do"),
        ("\u00fcber", "; ber would do"),
        ("", ""),
    ],
)
def test_names_that_would_not_work_are_refused(name: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not allowed: .* no keyword of Python" + hint.replace(".", r"\.") + "$"):
        plan("rewards", name, tmp_path, Registry())


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginConflictError, match=r"reward 'exact' \(slime-rl 0\.1\.0\) has that name"):
        plan("rewards", "exact", tmp_path, current_registry())
    registry = Registry()
    registry.add(ComponentRef("rewards", "mine", "x:y", distribution="other"))
    with pytest.raises(PluginConflictError, match="has that name"):
        plan("reward", "mine", tmp_path, registry)
    with pytest.raises(PluginConflictError, match=r"slime-reward-math 0\.1\.0 is installed"):
        plan("rewards", "math", tmp_path, Registry())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(plan("filters", "mine", tmp_path, Registry()))
    with pytest.raises(ConfigError, match=r"slime-filter-mine exists already; choose another name"):
        plan("filters", "mine", tmp_path, Registry())


def test_kinds_without_a_template_say_where_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no template; start from plugins/models/slime_models/qwen3"):
        plan("megatron_models", "mine", tmp_path, Registry())
    path = "plugins/models/slime_models/qwen3/megatron.py"
    assert (ROOT / path).is_file()
    assert any(path in reason for reason in _TOO_LARGE.values())
    with pytest.raises(PluginNotFoundError, match="Did you mean 'rewards'"):
        plan("rewads", "mine", tmp_path, Registry())


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write(plan("filters", "mine", tmp_path / "file", Registry()))
