from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_core.errors import ConfigError
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.options import check_plugin_options
from slime_core.plugins.registry import ComponentRef, Registry


def registry() -> Registry:
    made = Registry()
    made.add(ComponentRef("rewards", "math", "no_such_module:reward", distribution="a"))
    made.add(ComponentRef(HOOK_GROUP, "watch", "no_such_module", distribution="b"))
    return made


def test_plugins_of_any_kind_and_hook_modules_take_options() -> None:
    check_plugin_options(SimpleNamespace(plugins={}), registry())
    check_plugin_options(SimpleNamespace(plugins={"math": {"tolerance": 1}, "watch": {}}), registry())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mth", r"^plugins\.mth \(run\.yaml:3\): no plugin 'mth' .* Did you mean plugins\.math\? "),
        ("nosuch", r"^plugins\.nosuch \(run\.yaml:3\): no plugin 'nosuch' .* `slime plugins list` shows the names\. "),
    ],
)
def test_options_of_no_plugin_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plugin_options(SimpleNamespace(plugins={"math": {}, name: {"t": 1}}), registry(), "run.yaml:3")
