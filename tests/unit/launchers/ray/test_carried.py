"""Files named by settings arrive in one folder, with what they import, and settings name them there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from slime_launcher_ray import carried
from slime_launcher_ray.carried import Carried, find, root_of, stage

from slime_core.config import load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.discovery import PLUGIN_DIR_VARIABLE


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with plugins and what lies beside them."""
    files = {
        "mine/rm.py": "import beside, parts.words\n",
        "mine/beside.py": "",
        "mine/parts/__init__.py": "",
        "mine/parts/words.txt": "one two",
        "mine/data/train.jsonl": "{}",
        "dist/plug/pyproject.toml": "[project]",
        "dist/plug/.git/config": "",
        "other.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv(PLUGIN_DIR_VARIABLE, raising=False)
    return tmp_path / "work"


def _staged(args: Any, here: Path) -> tuple[Carried, Path]:
    folder = here.parent / "out"
    folder.mkdir(exist_ok=True)
    return stage(find(args), folder)


def test_a_file_with_its_neighbours(here: Path) -> None:
    settings = load_settings(["--custom-rm-path", "mine/rm.py:reward", "--lr", "0.5"], command="show")
    package, root = _staged(settings.args, here)
    names = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert names == {"0/rm.py", "0/beside.py", "0/parts/__init__.py", "0/parts/words.txt"}
    there = Path("/elsewhere", package.package)
    localized = package.localized(settings.args, there)
    assert localized.custom_rm_path == f"{there}/0/rm.py:reward"
    assert localized.lr == 0.5
    assert settings.args.custom_rm_path == "mine/rm.py:reward", "the driver's own are as they were"
    assert package.originally(there) == {f"{there}/0/rm.py:reward": f"{here}/mine/rm.py:reward"}


def test_nested_values_directories_and_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGIN_DIR_VARIABLE, str(here / "dist"))
    nested = {"a": [{"b": "other.py"}], "c": "absent.py", "d": "mine/data/train.jsonl"}
    assert find(nested) == {"other.py": here / "other.py", str(here / "dist"): here / "dist"}
    args = load_settings(["--plugin-dir", "dist", "--rollout-sample-hook-path", "other.py"], command="show").args
    package, root = _staged(args, here)
    assert not list(root.rglob(".git"))
    assert (root / package.moved["dist"] / "plug" / "pyproject.toml").is_file()
    localized = package.localized(args, root)
    assert localized.plugin_dir == [str(root / package.moved["dist"])]
    assert localized.rollout_sample_hook_path == [str(root / package.moved["other.py"])]
    variables = package.localized_environment({PLUGIN_DIR_VARIABLE: f"{here / 'dist'}{os.pathsep}/nowhere"}, root)
    assert variables[PLUGIN_DIR_VARIABLE] == f"{root / package.moved['dist']}{os.pathsep}/nowhere"


def test_too_much(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "LIMIT", 10)
    args = load_settings(["--custom-rm-path", "mine/rm.py"], command="show").args
    with pytest.raises(ConfigError, match="would go to the nodes"):
        _staged(args, here)


def test_it_is_found_on_the_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = load_settings(["--custom-rm-path", "mine/rm.py"], command="show").args
    package, root = _staged(args, here)
    with pytest.raises(ConfigError, match="did not bring"):
        root_of(package)
    monkeypatch.syspath_prepend(str(root.parent))
    assert root_of(package) == root
