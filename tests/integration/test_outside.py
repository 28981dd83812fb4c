"""Proof from outside: wheels in a fresh environment, no checkout in sight, and two rewards trained with by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import TinyRun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WHEELS = (
    ".",
    "plugins/rewards/math",
    "plugins/models/qwen3",
    "plugins/generators/single_turn",
    "plugins/buffers/fifo",
    "plugins/estimators/grpo",
)
"""The core, the reward of the proof, and what no run can do without."""

EDITED = '''"""Reward `digits_outside`: the share of digits in the response, times a factor."""

from __future__ import annotations

from typing import Any

from slime_core import PluginOptions, Sample, options


class Options(PluginOptions):
    """What a user may set."""

    factor: float = 1.0
    """Reward of a response that is all digits."""


def reward(args: Any, sample: Sample) -> float:
    """A random model learns this within a few steps."""
    digits = sum(character.isdigit() for character in sample.response)
    return options(args, "digits_outside", Options).factor * digits / max(len(sample.response), 1)
'''

EDITED_TEST = """from __future__ import annotations

from slime_testing_contracts import RewardContract


class TestDigitsOutside(RewardContract):
    component = "digits_outside"
    args = {"plugins": {"digits_outside": {"factor": 2.0}}}
    examples = [("1+1=", "12", "2", 2.0), ("1+1=", "a1", "2", 1.0), ("1+1=", "no", "2", 0.0)]
"""


def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLIME_", "PYTHON", "PYTEST"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**kept, **env}, capture_output=True, text=True, timeout=150
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass
class Outside:
    """A fresh environment in a folder of its own."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    def slime(self, *arguments: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "slime", *arguments, cwd=self.folder, check=check, **env)

    def python(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        return run(self.bin / "python", *arguments, cwd=cwd or self.folder).stdout

    def install(self, *projects: Path) -> None:
        """Build wheels and install them, from no index."""
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        wheels = self.folder / "wheels" / str(len(list(self.folder.glob("wheels/*"))))
        run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, *projects, cwd=self.folder)
        target = ("--python", str(self.bin / "python"))
        found = sorted(wheels.glob("*.whl"))
        assert len(found) == len(projects)
        run(*pip, *target, "install", "-q", "--no-deps", "--no-index", *found, cwd=self.folder)


def third_party_only(target: Path) -> None:
    """Links to what this interpreter's site-packages hold, slime's own distributions and editable installs left out."""
    target.mkdir()
    for site in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in site.iterdir():
            if (
                not entry.name.startswith(("slime", "_slime", "_editable", "__editable", "pip"))
                and entry.suffix != ".pth"
            ):
                link = target / entry.name
                if not link.exists():
                    link.symlink_to(entry)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """The core and slime's own plugins from wheels; torch and the like by path, since installing them takes minutes."""
    made = Outside(tmp_path_factory.mktemp("outside"))
    venv.create(made.folder / "venv", with_pip=False)
    (site,) = (made.folder / "venv").glob("lib/python*/site-packages")
    third_party_only(made.folder / "third_party")
    (site / "third_party.pth").write_text(f"{made.folder / 'third_party'}\n")
    made.install(*((ROOT / project).resolve() for project in WHEELS))
    return made


@pytest.fixture(scope="module")
def stranger(outside: Outside) -> Path:
    """A plugin made by `slime plugins new`, edited, tested and installed, all of it outside."""
    outside.slime("plugins", "new", "rewards", "digits_outside", "--dir", outside.folder / "work")
    folder = outside.folder / "work" / "slime-reward-digits-outside"
    checked = outside.slime("plugins", "check", folder).stdout
    assert checked.startswith("ok ")
    assert "tests passed" in checked
    (folder / "slime_reward_digits_outside" / "__init__.py").write_text(EDITED)
    (folder / "tests" / "test_contract.py").write_text(EDITED_TEST)
    assert outside.slime("plugins", "check", folder).stdout.startswith("ok ")
    outside.install(folder)
    return folder


def test_no_checkout_is_in_sight(outside: Outside) -> None:
    code = "import slime_core, sys; from slime_core.plugins.discovery import checkout_root; print(slime_core.__file__)"
    code += "; print(checkout_root()); print([p for p in sys.path])"
    file, root, path = outside.python("-c", code).splitlines()
    assert Path(file).is_relative_to(outside.folder / "venv")
    assert root == "None"
    assert str(ROOT) + "'" not in path
    names = {row["distribution"] for row in json.loads(outside.slime("plugins", "list", "--json").stdout)}
    assert names <= {
        "slime-rl", "slime-reward-math", "slime-model-qwen3", "slime-generator-single-turn", "slime-buffer-fifo",
        "slime-estimator-grpo", "slime-reward-digits-outside",
    }  # fmt: skip
    assert {"slime-rl", "slime-reward-math"} <= names


def test_the_core_wheel_has_all_of_core_and_no_plugin(outside: Outside) -> None:
    (site,) = (outside.folder / "venv").glob("lib/python*/site-packages")
    packaged = {file.relative_to(site).as_posix() for file in (site / "slime_core").rglob("*") if file.is_file()}
    source = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "slime_core").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in packaged if not name.endswith(".pyc")} == source
    assert not (site / "plugins").exists()
    assert not (site / "slime_reward_exact").exists()


KIT = """
def test_a_run(run_loop):
    run = run_loop(steps=2, custom_rm_path="my_rm.py:good")
    assert len(run.steps) == len(run.samples) == 2
    assert run.weight_checksums


def test_an_engine(scripted_engine, tiny_model_dir):
    assert (tiny_model_dir / "config.json").is_file()
    assert scripted_engine("one").requests == []
"""
KIT_REWARDS = """
def good(args, sample):
    return float("2" in sample.response)

def bad(args, sample):
    return float(len(sample.label))
"""


def test_the_kit_is_in_the_wheel(outside: Outside, tmp_path: Path) -> None:
    """Contracts without code, and the fixtures, from an empty folder."""
    (tmp_path / "my_rm.py").write_text(KIT_REWARDS)
    (tmp_path / "test_kit.py").write_text(KIT)
    pytest_run = (outside.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bare = (*pytest_run, "--pyargs", "slime_core.testing", "--slime-component")
    assert " passed" in run(*bare, "rewards:./my_rm.py:good", cwd=tmp_path).stdout
    bad = run(*bare, "rewards:./my_rm.py:bad", cwd=tmp_path, check=False)
    assert bad.returncode == 1
    assert "a reward must answer whatever the model wrote" in bad.stdout
    assert "2 passed" in run(*pytest_run, "test_kit.py", cwd=tmp_path).stdout


def test_a_strangers_plugin_is_shown_with_where_it_comes_from(outside: Outside, stranger: Path) -> None:
    shown = outside.slime("plugins", "show", "rewards/digits_outside").stdout
    assert "slime-reward-digits-outside 0.1.0" in shown
    assert str(outside.folder / "venv") in shown
    assert "plugins.digits_outside.factor" in shown
    assert outside.slime("plugins", "doctor").stdout.endswith("0 errors, 0 warnings\n")


@pytest.mark.parametrize("name", ["math", "digits_outside"])
def test_training_with_a_reward_by_name(
    name: str, outside: Outside, stranger: Path, tiny: TinyRun, tmp_path: Path
) -> None:
    options = {"set": "plugins.digits_outside.factor=3"} if name == "digits_outside" else {}
    argv = tiny.argv(tmp_path / "run", custom_rm_path=None, rm_type=name, num_rollout=2, **options)
    done = outside.slime("train", *argv)
    assert "2 rollouts in" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    used = {plugin["name"]: plugin for plugin in summary["plugins"]}
    distribution = f"slime-reward-{name}".replace("_", "-")
    assert (used[name]["distribution"], used[name]["version"]) == (distribution, "0.1.0")
    for plugin in summary["plugins"]:
        assert Path(plugin["source_file"]).is_relative_to(outside.folder / "venv"), plugin
        assert len(plugin["sha256"]) == 64
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["rollout/raw_reward"] for line in lines if "rollout/raw_reward" in line]
    assert len(rewards) == 2
    if name == "digits_outside":  # a random model writes some digits, and no answers
        assert all(0 < reward <= 3 for reward in rewards)


def test_a_plugin_for_another_slime_names_both_versions_and_what_to_type(
    outside: Outside, stranger: Path, tiny: TinyRun, tmp_path: Path
) -> None:
    (info,) = (outside.folder / "venv").glob("lib/python*/site-packages/slime_reward_digits_outside-*.dist-info")
    metadata = info / "METADATA"
    before = metadata.read_text()
    metadata.write_text(before.replace("Requires-Dist: slime-rl<0.2,>=0.1", "Requires-Dist: slime-rl<0.9,>=0.8"))
    assert metadata.read_text() != before
    try:
        done = outside.slime(
            "train", *tiny.argv(tmp_path / "run", custom_rm_path=None, rm_type="digits_outside"), check=False
        )
        checked = outside.slime("plugins", "check", "slime-reward-digits-outside", check=False)
    finally:
        metadata.write_text(before)
    assert checked.returncode == 1
    for text in (checked.stdout, done.stderr):
        assert "needs slime-rl<0.9,>=0.8, but slime-rl 0.1.0 is running" in text
        assert "pip install --upgrade slime-reward-digits-outside" not in text, "a name that anybody could take"
    assert done.returncode == 2


def test_a_broken_stranger_stops_no_safe_mode(outside: Outside, tiny: TinyRun, tmp_path: Path) -> None:
    outside.slime("plugins", "new", "hooks", "bad_outside", "--dir", tmp_path)
    folder = tmp_path / "slime-hooks-bad-outside"
    (folder / "slime_hooks_bad_outside" / "__init__.py").write_text("1 / 0\n")
    where = {"SLIME_PLUGIN_DIR": str(folder)}
    assert "hooks" in outside.slime("plugins", "list", **where).stdout
    argv = tiny.argv(tmp_path / "run", custom_rm_path=None, rm_type="math", num_rollout=1)
    stopped = outside.slime("rollout", *argv, check=False, **where)
    assert stopped.returncode == 2
    assert "ZeroDivisionError" in stopped.stderr
    assert stopped.stderr.rstrip().endswith("To run without it: --no-plugins")
    assert "rollout 0: 16 samples" in outside.slime("rollout", *argv, "--no-plugins", **where).stdout
