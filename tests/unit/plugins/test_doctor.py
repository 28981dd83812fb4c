from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from slime_commands.plugins import doctor
from slime_commands.plugins.doctor import Finding, examine, stale_installs
from slime_sandbox_local import Isolation, isolation

from slime_core.plugins.manager import current_registry

REWARD = "def reward(args, sample):\n    return 1.0\n"
HOOK = "from slime_core import hookimpl\n@hookimpl\ndef slime_run_end(error):\n    pass\n"


@pytest.fixture(autouse=True)
def _directory(monkeypatch: pytest.MonkeyPatch, plugin_dir: Path) -> None:
    monkeypatch.setenv("SLIME_PLUGIN_DIR", str(plugin_dir))


def strangers() -> list[Finding]:
    """Of the throw-away plugins alone; what else is installed is not this test's business."""
    return [f for f in examine(current_registry()) if "thing-" in f.what or "SLIME_PLUGIN" in f.what]


def found(topic: str) -> list[Finding]:
    return [finding for finding in strangers() if finding.topic == topic]


@pytest.mark.parametrize(
    ("body", "requires", "topic", "what"),
    [
        ("1 / 0\n", (), "broken", "ZeroDivisionError"),
        ("", (), "broken", "has no 'reward'"),
        ("def reward(sample):\n    return 1.0\n", (), "signature", r"found reward\(sample\)"),
        (f"slime_api = 9\n{REWARD}", (), "incompatible", "written for version 9 of the API of rewards"),
        (REWARD, ("slime-rl-core<0.0.1",), "requirement", r"needs slime-rl-core<0\.0\.1, but \d.* is installed"),
        (REWARD, ("nothing-of-the-sort>=2",), "requirement", r"needs nothing-of-the-sort>=2, but it is not installed"),
        (REWARD, ("pytest<1",), "requirement", r"needs pytest<1, but \d.* is installed"),
    ],
)
def test_components_that_cannot_be_used(
    body: str, requires: tuple[str, ...], topic: str, what: str, write_plugin
) -> None:
    write_plugin("thing-bad", {"slime.rewards": {"bad": "plug_thing_bad:reward"}}, body, requires=requires)
    (finding,) = found(topic)
    assert finding.level == "error"
    assert re.search(what, finding.what)
    assert finding.way_out
    assert "bad" in finding.stops


def test_a_machine_that_cannot_isolate_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Isolation({"user namespace": "not permitted"})
    monkeypatch.setattr(isolation, "isolation_here", lambda: here)
    (finding,) = [f for f in examine(current_registry()) if f.topic == "sandbox"]
    assert "no user namespace (not permitted)" in finding.what
    assert finding.level == "warning"
    assert "user.max_user_namespaces" in finding.way_out


def test_conflicts_and_hooks(write_plugin) -> None:
    for name in ("one", "two"):
        groups = {
            "slime.rewards": {"same": f"plug_thing_{name}:reward"},
            "slime.plugins": {"watch": f"plug_thing_{name}"},
        }
        write_plugin(f"thing-{name}", groups, REWARD + HOOK)
    component, hook = sorted(found("conflicting"), key=lambda f: f.stops)[::-1]
    assert component.way_out.startswith("select it as thing-one:same or thing-two:same")
    assert hook.stops == "every run"
    assert hook.way_out == "pip uninstall thing-two, or SLIME_PLUGINS=thing-one:watch"


def test_one_hook_module_twice(write_plugin) -> None:
    write_plugin("thing-hooks", {"slime.plugins": {"a": "plug_thing_hooks", "b": "plug_thing_hooks"}}, HOOK)
    (finding,) = found("duplicate")
    assert (finding.level, "called twice" in finding.what) == ("warning", True)


def test_directories_without_effect(
    plugin_dir: Path, write_plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty, gone = tmp_path / "empty", tmp_path / "gone"
    empty.mkdir()
    monkeypatch.setenv("SLIME_PLUGIN_DIR", f"{empty}:{gone}")
    findings = list(doctor._directories())
    assert [f.what.split(") ")[-1] for f in findings] == ["holds no plugin", "is not a directory"]
    assert {f.level for f in findings} == {"error"}
    monkeypatch.setenv("SLIME_NO_PLUGINS", "1")
    (finding,) = doctor._directories()
    assert (finding.level, "not searched in safe mode" in finding.what) == ("warning", True)


def test_a_group_that_is_none_of_slimes(write_plugin) -> None:
    write_plugin("thing-typo", {"slime.reward": {"typo": "plug_thing_typo:reward"}}, REWARD)
    (finding,) = found("unusable")
    assert "entry-point group 'slime.reward' is none of slime's. Did you mean 'slime.rewards'?" in finding.what


def test_the_copy_that_is_not_used(
    write_plugin, plugin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin("thing-copy", {"slime.rewards": {"copy": "plug_thing_copy:reward"}}, REWARD)
    info = tmp_path / "site" / "thing_copy-0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-copy\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[slime.rewards]\ncopy = plug_thing_copy:reward\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (finding,) = found("shadowed")
    assert finding.level == "warning"
    assert f"rewards/copy: thing-copy 1.0 in {plugin_dir / 'thing-copy'} is used" in finding.what
    assert "thing-copy 0.9 (installed) is not" in finding.what


def test_files_of_a_plugin_that_hide_modules(write_plugin) -> None:
    folder = write_plugin("thing-hides", {"slime.rewards": {"hides": "plug_thing_hides:reward"}}, REWARD)
    (folder / "json.py").write_text("")
    (folder / "packaging").mkdir()
    (folder / "packaging" / "__init__.py").write_text("")
    (folder / "conftest.py").write_text("")
    hidden = [finding.what for finding in found("shadowed")]
    assert len(hidden) == 2
    assert "hides the standard library's 'json'" in hidden[0]
    assert "hides the installed " in hidden[1]


@pytest.fixture
def editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An editable install of a plugin; its folder."""
    folder = tmp_path / "thing source"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "thing-edit"\nversion = "1.0"\n[project.entry-points."slime.rewards"]\nedit = "m:reward"\n'
    )
    info = tmp_path / "site" / "thing_edit-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-edit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.rewards]\nedit = m:reward\n[console_scripts]\nx = m:x\n")
    (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def stale() -> list[tuple[str, str, str]]:
    return [row for row in stale_installs() if row[0] == "thing-edit"]


def test_editable_installs_that_have_gone_stale(editable: Path) -> None:
    assert metadata.version("thing-edit") == "1.0"
    assert stale() == []
    file = editable / "pyproject.toml"
    file.write_text(file.read_text().replace("edit =", "edited =").replace("1.0", "1.1"))
    entries, version = stale()
    assert entries[1] == "its entry points have changed since: slime.rewards:edit, slime.rewards:edited"
    assert version[1] == "its version is 1.1 by now, installed as 1.0"
    assert entries[2] == f"pip install --no-deps -e {editable}"
    file.unlink()
    assert stale() == []
    editable.rmdir()
    assert stale() == [("thing-edit", f"its folder {editable} is gone", "pip uninstall thing-edit")]


def installed(site: Path, name: str, version: str, *files: str) -> None:
    """A distribution of these files, as a wheel leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text("")


CORE_FILES = ("slime_core/__init__.py", "slime_core/loop.py")


def test_a_core_whose_files_an_old_bundle_has_or_took_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(name: str) -> metadata.Distribution | None:
        return next(iter(metadata.distributions(name=name, path=[str(tmp_path)])), None)

    monkeypatch.setattr(doctor, "installed", here)
    installed(tmp_path, "slime-rl-core", "0.2", *CORE_FILES)
    installed(tmp_path, "slime-rl", "0.2", "slime_buffers/fifo.py")
    assert list(doctor._core_files()) == []
    installed(tmp_path, "slime-rl", "0.1", *CORE_FILES)
    (tmp_path / "slime_rl-0.2.dist-info" / "METADATA").unlink()
    (tmp_path / "slime_rl-0.2.dist-info" / "RECORD").unlink()
    (tmp_path / "slime_rl-0.2.dist-info").rmdir()
    (mixed,) = doctor._core_files()
    assert mixed.level == "warning"
    assert mixed.what == "slime-rl 0.1 has 2 of slime-rl-core's files, which pip deletes with it"
    for file in (*CORE_FILES[1:], "slime_rl-0.1.dist-info/RECORD"):
        (tmp_path / file).unlink()
    (gone,) = doctor._core_files()
    assert (gone.level, gone.topic) == ("error", "core")
    assert gone.what == "1 of 2 files of slime-rl-core 0.2 are gone, such as slime_core/loop.py"
    assert gone.way_out == "pip install --force-reinstall --no-deps slime-rl-core==0.2"


def test_distributions_that_are_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not [f for f in doctor._namesakes() if " 7.7 " in f.what]
    installed(tmp_path, "slime-core", "7.7", "slimecore.py")
    installed(tmp_path, "slime", "7.7", "slime/__init__.py")
    one, other = doctor._namesakes()
    assert one.what.startswith("slime 7.7 is installed, which is THUDM/slime's, or a stranger's")
    assert "slime's are slime-rl-core and slime-rl" in other.what
    assert (other.level, other.way_out) == ("warning", "unless you want it: pip uninstall slime-core")
