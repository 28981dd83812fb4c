"""A stranger's view: wheels of core and of a plugin, installed somewhere, with no checkout in sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "slime-reward-third-party"
version = "3.2.1"
dependencies = ["slime-rl>=0.1"]

[project.entry-points."slime.rewards"]
third_party = "slime_reward_third_party:reward"

[tool.hatch.build.targets.wheel]
packages = ["slime_reward_third_party"]
"""
BODY = """
from slime_core import Sample

def reward(args, sample: Sample) -> float:
    return float(len(sample.response))
"""
PROBE = """
import json, sys
import slime_core
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
resolved = resolve("rewards", "third_party")
sample = slime_core.Sample(response="four")
print(json.dumps({
    "score": resolved.obj(None, sample),
    "core": slime_core.__file__,
    "facts": resolved.provenance(),
    "rewards": current_registry().names("rewards"),
}))
"""


def pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with core and the stranger's plugin installed from wheels."""
    tmp = tmp_path_factory.mktemp("outside")
    plugin = tmp / "third-party"
    (plugin / "slime_reward_third_party").mkdir(parents=True)
    (plugin / "pyproject.toml").write_text(PYPROJECT)
    (plugin / "slime_reward_third_party" / "__init__.py").write_text(BODY)
    for project in (ROOT, plugin):
        pip("wheel", str(project), "--no-build-isolation", "--wheel-dir", str(tmp / "wheels"))
    wheels = sorted(str(wheel) for wheel in (tmp / "wheels").glob("*.whl"))
    assert len(wheels) == 2
    pip("install", *wheels, "--target", str(tmp / "site"))
    return tmp / "site"


def probe(site: Path, code: str) -> str:
    """Run code in a fresh process that sees `site` and the dependencies, but neither checkout nor its plugins."""
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    # -S keeps .pth files of editable installs out; the dependencies come back by path, after `site`.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *dependencies]), "SLIME_PLUGIN_DIR": ""}
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(
        command, env=environment, cwd=site.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_strangers_plugin_is_found_by_name(site: Path) -> None:
    found = json.loads(probe(site, PROBE))
    assert found["score"] == 4.0
    assert Path(found["core"]).is_relative_to(site)
    assert (found["facts"]["distribution"], found["facts"]["version"]) == ("slime-reward-third-party", "3.2.1")
    assert Path(found["facts"]["source_file"]).is_relative_to(site)
    assert "third_party" in found["rewards"]


def test_the_core_wheel_brings_no_plugin_and_all_of_core(site: Path) -> None:
    assert not list(site.glob("slime_reward_math*"))
    assert not (site / "plugins").exists()
    packaged = {file.relative_to(site).as_posix() for file in (site / "slime_core").rglob("*.py")}
    assert "slime_core/plugins/resolve.py" in packaged
    assert "slime_core/testing/scripted.py" in packaged
    assert (site / "slime_core" / "py.typed").exists()


def test_the_command_lists_it(site: Path) -> None:
    code = "from slime_core.cli.main import main; raise SystemExit(main(['plugins', 'show', 'rewards/third_party']))"
    shown = probe(site, code)
    assert "slime-reward-third-party 3.2.1" in shown
    assert "--custom-rm-path" in shown
