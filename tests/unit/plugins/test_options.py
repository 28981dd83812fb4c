from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field

from slime_core import PluginOptions, options
from slime_core.config import Args
from slime_core.errors import ConfigError
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.options import check_plugin_options, option_name
from slime_core.plugins.registry import ComponentRef, Registry, Resolved
from slime_core.plugins.resolve import resolve


def registry() -> Registry:
    made = Registry()
    made.add(ComponentRef("rewards", "math", "no_such_module:reward", distribution="a"))
    made.add(ComponentRef(HOOK_GROUP, "watch", "no_such_module", distribution="b"))
    return made


def test_plugins_of_any_kind_and_hook_modules_take_options() -> None:
    check_plugin_options(Args(plugins={}), registry())
    check_plugin_options(Args(plugins={"math": {"tolerance": 1}, "watch": {}}), registry())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mth", r"^plugins\.mth \(run\.yaml:3\): no plugin 'mth' .* Did you mean plugins\.math\? "),
        ("nosuch", r"^plugins\.nosuch \(run\.yaml:3\): no plugin 'nosuch' .* `slime plugins list` shows the names\. "),
    ],
)
def test_options_of_no_plugin_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plugin_options(Args(plugins={"math": {}, name: {"t": 1}}), registry(), "run.yaml:3")


class Options(PluginOptions):
    tolerance: float = Field(1e-6, ge=0)
    """Largest distance
    that counts as equal."""
    unit: str
    """What is measured."""


class Near:
    def compute_reward(self, prompts: Any, responses: Any) -> list[float]:
        return [0.0 for _ in responses]


class Strict(BaseModel, extra="forbid"):
    depth: int = 3


class Deep:
    Options = Strict


class Free(BaseModel, extra="allow"):
    pass


def untyped(args: Any, sample: Any) -> float:
    return 0.0


untyped.__module__ = "builtins"  # a module without Options
MATH = ComponentRef("rewards", "math", "x:y", distribution="a", version="1")
ENGINE = ComponentRef("engines", "math", "x:y", distribution="b", version="1")


def check(given: dict[str, Any], *objects: Any) -> None:
    used = [Resolved(obj, ref) for ref, obj in zip((MATH, ENGINE), objects)]
    check_plugin_options(Args(plugins=given), registry(), "run.yaml:3", used)


def test_typed_access_fills_in_defaults_and_needs_no_run() -> None:
    given = Args(plugins={"math": {"tolerance": "0.5", "unit": "m", "other": 1}})
    assert options(given, "math", Options) == Options(tolerance=0.5, unit="m")
    for args in (None, Args(), Args(plugins={})):
        assert options(args, "deep", Strict).depth == 3
    with pytest.raises(ConfigError, match=r"^plugins\.math\.unit: must be given; type --set plugins\.math\.unit=VALUE"):
        options(None, "math", Options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"^plugins\.math\.unit \(run\.yaml:3\): must be given"),
        ({"unit": "m", "tolerance": "big"}, r"^plugins\.math\.tolerance 'big' \(run\.yaml:3\): must be a number$"),
        ({"unit": "m", "tolerance": -1}, r"^plugins\.math\.tolerance -1 .*: must be greater than or equal to 0$"),
        (
            {"unit": "m", "tolerence": 1},
            r"^plugins\.math\.tolerence 1 \(run\.yaml:3\): reward 'math' \(a 1\) has no option 'tolerence'\."
            r" Did you mean plugins\.math\.tolerance\?$",
        ),
        ({"unit": "m", "q": 1}, r"has no option 'q'\. Its options: tolerance, unit$"),
    ],
)
def test_wrong_options_are_refused_with_the_way_out(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check({"math": given}, Near)


def test_components_of_one_name_share_the_mapping() -> None:
    check({"math": {"unit": "m", "depth": 2}}, Near, Deep)
    with pytest.raises(ConfigError, match=r"plugins\.math\.depth 'x' .*: must be a whole number"):
        check({"math": {"unit": "m", "depth": "x"}}, Near, Deep)
    with pytest.raises(ConfigError, match=r"reward 'math' \(a 1\) and engine 'math' \(b 1\) has no option 'width'"):
        check({"math": {"unit": "m", "width": 2}}, Near, Deep)
    check({"math": {"unit": "m", "width": 2}}, Near, SimpleNamespace(Options=Free))


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    check({}, untyped)
    assert caplog.messages == []
    check({"math": {"tolerance": 1}})
    check({"watch": {"x": 1}}, untyped)
    check({"math": {"tolerance": 1}}, untyped)
    assert caplog.messages == [
        "plugins.math (run.yaml:3): without effect, since this run uses no plugin 'math' (selected by --rm-type or"
        " --custom-rm-path), unless a row of the data or another plugin chooses it",
        "plugins.watch (run.yaml:3): without effect, since this run uses no plugin 'watch' (hook plugin that is not"
        " loaded)",
        "plugins.math (run.yaml:3): not checked, since reward 'math' (a 1) declares no Options",
    ]


def test_a_file_is_named_by_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "my_rm.py"
    file.write_text(
        "from slime_core import PluginOptions, options\n"
        "class Options(PluginOptions):\n    scale: float = 2.0\n    'Factor.'\n"
        "def reward(args, sample):\n    return options(args, 'my_rm', Options).scale\n"
    )
    found = resolve("rewards", str(file))
    assert option_name(found.ref) == "my_rm"
    args = Args(plugins={"my_rm": {"scale": 3}})
    check_plugin_options(args, registry(), "", [found])
    assert found.obj(args, None) == 3.0
    assert option_name(ComponentRef("rewards", "pkg.near:reward", "pkg.near:reward")) == "near"
    with pytest.raises(ConfigError, match=r"Did you mean plugins\.my_rm\?"):
        check_plugin_options(Args(plugins={"myrm": {}}), registry(), "", [found])
