from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginLoadError, PluginNotFoundError
from slime_core.plugins.discovery import add_plugin_directories
from slime_core.plugins.resolve import find, resolve

REWARD = "def reward(args, sample):\n    return 1.0\n"


# -- names -----------------------------------------------------------------------------------------------


def test_a_name_from_a_plugin_directory_is_on_the_path_only_once_loaded(write_plugin, plugin_dir: Path) -> None:
    folder = write_plugin("thing-one", {"slime.rewards": {"one": "plug_thing_one:reward"}}, REWARD)
    add_plugin_directories([plugin_dir])
    assert find("rewards", "one") is not None
    assert str(folder) not in sys.path
    resolved = resolve("rewards", "one")
    assert resolved.obj(None, None) == 1.0
    assert str(folder) in sys.path
    assert resolved.ref.folder == folder


def test_an_entry_point_without_attribute_takes_the_canonical_name(write_plugin, plugin_dir: Path) -> None:
    write_plugin("thing-bare", {"slime.rewards": {"bare": "plug_thing_bare"}}, REWARD)
    add_plugin_directories([plugin_dir])
    assert resolve("rewards", "bare").obj.__name__ == "reward"


def test_a_broken_plugin_hurts_only_who_selects_it(write_plugin, plugin_dir: Path) -> None:
    folder = write_plugin("thing-broken", {"slime.rewards": {"broken": "plug_thing_broken:reward"}}, "x = 1\n1 / 0\n")
    write_plugin("thing-fine", {"slime.rewards": {"fine": "plug_thing_fine:reward"}}, REWARD)
    add_plugin_directories([plugin_dir])
    assert resolve("rewards", "fine").obj(None, None) == 1.0
    where = str(folder / "plug_thing_broken" / "__init__.py")
    with pytest.raises(PluginLoadError) as caught:
        resolve("rewards", "broken", origin="--rm-type (flag)")
    message = str(caught.value)
    assert message.startswith("--rm-type (flag): reward 'broken' (thing-broken 1.0)")
    assert f"{where}:2" in message
    assert "ZeroDivisionError" in message


@pytest.mark.parametrize("target", ["no_such_module:reward", "plug_thing_t:absent"])
def test_a_target_that_is_not_there_names_the_distribution(target: str, write_plugin, plugin_dir: Path) -> None:
    write_plugin("thing-t", {"slime.rewards": {"t": target}}, REWARD)
    add_plugin_directories([plugin_dir])
    with pytest.raises(PluginLoadError, match=rf"entry point '{target}' of thing-t 1\.0"):
        resolve("rewards", "t")


def test_a_missing_requirement_says_what_to_install(write_plugin, plugin_dir: Path) -> None:
    body = "import no_such_package_of_ours\n" + REWARD
    folder = write_plugin("thing-needs", {"slime.rewards": {"needs": "plug_thing_needs:reward"}}, body)
    add_plugin_directories([plugin_dir])
    with pytest.raises(PluginLoadError) as caught:
        resolve("rewards", "needs")
    assert "No module named 'no_such_package_of_ours'" in str(caught.value)
    assert f"pip install -e {folder}" in str(caught.value)


def test_another_module_of_the_same_name_is_not_taken(write_plugin, plugin_dir: Path) -> None:
    write_plugin("thing-p", {"slime.rewards": {"p": "plug_shared:reward"}}, REWARD, module="plug_shared")
    write_plugin("thing-q", {"slime.rewards": {"q": "plug_shared:reward"}}, REWARD, module="plug_shared")
    add_plugin_directories([plugin_dir])
    resolve("rewards", "p")
    with pytest.raises(PluginLoadError, match="another distribution has a module of that name"):
        resolve("rewards", "q")


# -- import paths ----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "thing_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rewards.py").write_text(REWARD + "class Box:\n    " + REWARD.replace("\n", "\n    "))
    return folder


@pytest.mark.parametrize("spec", ["thing_pkg.rewards:reward", "thing_pkg.rewards.reward"])
def test_import_paths_find_modules_of_the_working_directory(spec: str, package: Path) -> None:
    resolved = resolve("rewards", spec)
    assert resolved.obj(None, None) == 1.0
    assert resolved.ref.target == "thing_pkg.rewards:reward"
    assert resolved.ref.source_file == package / "rewards.py"


def test_an_import_error_two_modules_deep_names_both_lines(package: Path) -> None:
    (package / "inner.py").write_text("\nraise ValueError('inner')\n")
    (package / "outer.py").write_text("from thing_pkg import inner\n")
    with pytest.raises(PluginLoadError) as caught:
        resolve("rewards", "thing_pkg.outer:reward")
    assert f"{package / 'inner.py'}:2 (imported by {package / 'outer.py'}:1): ValueError: inner" in str(caught.value)


def test_a_missing_module_and_a_missing_attribute(package: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="no module 'thing_none'"):
        resolve("rewards", "thing_none.x:reward")
    with pytest.raises(PluginNotFoundError, match=r"no module 'thing_pkg\.none'"):
        resolve("rewards", "thing_pkg.none.reward")
    with pytest.raises(PluginNotFoundError, match=r"has no 'rewrad'. Public callables there: reward, Box"):
        resolve("rewards", "thing_pkg.rewards:rewrad")


# -- files -----------------------------------------------------------------------------------------------


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rm.py").write_text("def other(args, sample):\n    return 2.0\n" + REWARD)
    monkeypatch.chdir(tmp_path)
    for spec in ("my_rm.py", "./my_rm.py", "my_rm.py:reward", str(tmp_path / "my_rm.py")):
        assert resolve("rewards", spec).obj(None, None) == 1.0
    resolved = resolve("rewards", "my_rm.py:other")
    assert resolved.obj(None, None) == 2.0
    assert resolved.ref.target == f"{tmp_path / 'my_rm.py'}:other"
    module = sys.modules[resolved.obj.__module__]
    assert module.__name__.startswith("slime_file_my_rm_")


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "rm.py"
    file.write_text("def one(args, sample): ...\ndef two(args, sample): ...\n")
    with pytest.raises(PluginNotFoundError, match=r"defines one, two; name one of them reward or reward_func, or"):
        resolve("rewards", str(file))
    file = tmp_path / "empty.py"
    file.write_text("x = 1\n")
    with pytest.raises(PluginNotFoundError, match="defines no public function or class"):
        resolve("rewards", str(file))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = 1\ny = (\n", r"rm\.py:2: SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"rm\.py:2: SystemExit: 3"),
        ("\n\nimport thing_missing\n", r"rm\.py:3: ModuleNotFoundError"),
    ],
)
def test_a_file_that_does_not_load(body: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "rm.py").write_text(body)
    for _ in range(2):  # a failed module is not remembered as loaded
        with pytest.raises(PluginLoadError, match=expected):
            resolve("rewards", f"{tmp_path}/rm.py")


# -- shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["a b", "", "a/b", "/x/y.json", "mod:", ":attr", "mod.:x", "a..b"])
def test_other_shapes_are_refused_with_the_grammar(spec: str) -> None:
    with pytest.raises(PluginNotFoundError, match=r"not a component; write name, dist:name, pkg.module:attr"):
        resolve("rewards", spec)


def test_a_word_before_a_colon_is_a_distribution_only_if_it_offers_plugins(
    write_plugin, plugin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin("thing", {"slime.rewards": {"r": "plug_thing:reward"}}, REWARD)
    (tmp_path / "thing_mod.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    add_plugin_directories([plugin_dir])
    assert resolve("rewards", "thing:r").ref.distribution == "thing"
    assert resolve("rewards", "thing_mod:reward").ref.distribution == ""
    with pytest.raises(PluginNotFoundError, match="no rewards plugin 'reward' from 'thing-mod'"):
        resolve("rewards", "thing-mod:reward")


def test_provenance(tmp_path: Path) -> None:
    file = tmp_path / "rm.py"
    file.write_text(REWARD)
    facts = resolve("rewards", str(file)).ref.provenance()
    assert facts["sha256"] == hashlib.sha256(REWARD.encode()).hexdigest()
    assert facts["source_file"] == str(file)
    assert facts["kind"] == "rewards"
    named = resolve("rewards", "exact").ref.provenance()
    assert (named["name"], named["distribution"], named["version"]) == ("exact", "slime-rl", "0.1.0")
