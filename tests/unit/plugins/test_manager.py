from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import ConfigError, PluginConflictError, PluginError, PluginLoadError
from slime_core.plugins.manager import build_manager

HOOKS = {"slime.plugins": {"watch": "plug_thing_hooks"}}
BODY = """
from slime_core import hookimpl
calls = []

@hookimpl
def slime_register_components(registry):
    registry.add_object("rewards", "from_hook", lambda args, sample: 5.0)

@hookimpl
def slime_step_end(metrics):
    calls.append(metrics)
"""


def manager(plugin_dir: Path, **options: Any) -> Any:
    return build_manager(Args(plugin_dir=[str(plugin_dir)]), **options)


def names(built: Any) -> set[str]:
    return {name for name, _ in built.list_name_plugin()}


def test_hook_modules_are_called_with_the_parameters_they_take(write_plugin, plugin_dir: Path) -> None:
    write_plugin("thing-hooks", HOOKS, BODY)
    built = manager(plugin_dir)
    built.hook.slime_step_end(rollout_id=1, metrics={"a": 1.0})
    assert built.get_plugin("thing-hooks:watch").calls == [{"a": 1.0}]


def test_the_allow_list_names_what_exists(write_plugin, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plugin("thing-hooks", HOOKS, BODY)
    monkeypatch.setenv("SLIME_PLUGINS", "wotch")
    with pytest.raises(PluginError, match=r"SLIME_PLUGINS: no plugin wotch\. Installed distributions: .*thing-hooks"):
        manager(plugin_dir)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0\n", r"hook plugin 'watch' \(thing-hooks 1\.0\): importing .*:1: ZeroDivisionError"),
        (
            BODY.replace("slime_step_end", "slime_stepp_end"),
            r"\(thing-hooks 1\.0\).*unknown hook 'slime_stepp_end'.*Did you mean slime_step_end\?",
        ),
        (BODY.replace("metrics", "metricks"), r"\(thing-hooks 1\.0\).*metricks"),
        (
            "from slime_core import hookimpl\n@hookimpl\ndef slime_register_components(registry):\n    1 / 0\n",
            r"\(thing-hooks 1\.0\): ZeroDivisionError",
        ),
    ],
    ids=["import", "hook-name", "parameter", "hook-raises"],
)
def test_a_broken_hook_module_is_one_error_and_can_be_left_out(
    body: str, message: str, write_plugin, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin("thing-hooks", HOOKS, body)
    with pytest.raises(PluginLoadError, match=message) as caught:
        manager(plugin_dir)
    assert str(caught.value).endswith("To run without it: --no-plugins")
    monkeypatch.setenv("SLIME_PLUGINS", "")
    manager(plugin_dir)


def test_two_hook_modules_of_one_name_are_refused(
    write_plugin, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin("thing-hooks", HOOKS, BODY)
    write_plugin("thing-other", {"slime.plugins": {"watch": "plug_thing_other"}}, BODY)
    with pytest.raises(PluginConflictError, match=r"'watch' is offered by thing-hooks 1\.0 and thing-other 1\.0"):
        manager(plugin_dir)
    monkeypatch.setenv("SLIME_PLUGINS", "thing-other:watch")
    assert "thing-other:watch" in names(manager(plugin_dir))


def test_a_plugin_directory_without_a_plugin_is_refused(plugin_dir: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--plugin-dir .*{plugin_dir} holds no plugin\. Expected there"):
        manager(plugin_dir)
    (plugin_dir / "pyproject.toml").write_text("[project")
    with pytest.raises(ConfigError, match=rf"{plugin_dir} holds no plugin: .*pyproject\.toml: TOMLDecodeError"):
        manager(plugin_dir)


def test_a_broken_neighbour_of_a_plugin_is_a_warning(
    write_plugin, plugin_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_plugin("thing-fine", {"slime.rewards": {"fine": "x:y"}}, "")
    manager(plugin_dir)
    assert caplog.messages == []
    (plugin_dir / "broken").mkdir()
    (plugin_dir / "broken" / "pyproject.toml").write_text("[project")
    manager(plugin_dir)
    (message,) = caplog.messages
    assert message.startswith(f"--plugin-dir / SLIME_PLUGIN_DIR: {plugin_dir}: not usable: ")
    assert "broken/pyproject.toml: TOMLDecodeError" in message
