from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_core.plugins.discovery import add_directory, add_installed, add_plugin_directories, plugin_directories
from slime_core.plugins.registry import RANK_EXPLICIT, Registry

EXPLODES = "raise RuntimeError('imported')\n"


def registered(directory: Path, rank: int = RANK_EXPLICIT) -> Registry:
    registry = Registry()
    add_directory(registry, directory, rank)
    return registry


def test_a_directory_is_read_at_three_depths_without_importing(write_plugin, plugin_dir: Path) -> None:
    folder = write_plugin("thing-a", {"slime.rewards": {"a": "plug_thing_a:reward"}}, EXPLODES, requires=("x>=1",))
    for directory in (folder, plugin_dir, plugin_dir.parent):
        (ref,) = registered(directory)
        assert (ref.kind, ref.name, ref.target) == ("rewards", "a", "plug_thing_a:reward")
        assert (ref.distribution, ref.version, ref.requires) == ("thing-a", "1.0", ("x>=1",))
        assert ref.folder == folder
    assert str(folder) not in sys.path


@pytest.mark.parametrize("text", ["[project", 'project = "x"', "[project]\nentry-points = 3\n"])
def test_an_unreadable_pyproject_is_a_problem_that_stops_nobody(text: str, write_plugin, plugin_dir: Path) -> None:
    write_plugin("thing-c", {"slime.rewards": {"c": "x:y"}}, "")
    (plugin_dir / "broken").mkdir()
    (plugin_dir / "broken" / "pyproject.toml").write_text(text)
    registry = registered(plugin_dir)
    assert registry.names("rewards") == ["c"]
    assert "broken" in registry.problems[0].where


def test_installed_metadata_is_read_also_when_it_came_after_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    add_installed(registry := Registry())
    assert "thing" not in registry.names("rewards")
    info = tmp_path / "slime_reward_thing-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slime-reward-thing\nVersion: 2.1\nRequires-Dist: slime-rl>=0.1\n"
    )
    (info / "entry_points.txt").write_text("[slime.rewards]\nthing = no_such_module:reward\n")
    for _ in range(2):
        add_installed(registry := Registry())
        ref = registry.get("rewards", "thing")
        assert (ref.distribution, ref.version, ref.requires) == ("slime-reward-thing", "2.1", ("slime-rl>=0.1",))


def test_plugin_directories_add_up_and_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLIME_PLUGIN_DIR")
    add_plugin_directories([])
    assert "SLIME_PLUGIN_DIR" not in os.environ
    add_plugin_directories(["a"])
    add_plugin_directories([tmp_path / "a", "b"])
    assert plugin_directories() == [tmp_path / "a", tmp_path / "b"]
    assert os.environ["SLIME_PLUGIN_DIR"] == f"{tmp_path / 'a'}{os.pathsep}{tmp_path / 'b'}"


def test_an_empty_plugin_directory_is_not_the_working_directory() -> None:
    with pytest.raises(ConfigError, match=r"--plugin-dir '': expected a directory"):
        add_plugin_directories([""])


def test_a_plugin_directory_must_exist() -> None:
    add_plugin_directories(["/no/such/place"])
    with pytest.raises(ConfigError, match="/no/such/place is not a directory"):
        plugin_directories()


def test_listing_loads_neither_torch_nor_pydantic_nor_a_plugin() -> None:
    code = (
        "import sys; from slime_core.plugins.manager import current_registry as r; assert r().names('rewards');"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch','numpy','pydantic','transformers','rich')"
        " or m.startswith(('slime_reward','slime_model'))]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
