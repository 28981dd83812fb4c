"""User code that raises is named, with its line; slime's own errors pass unchanged."""

from __future__ import annotations

import inspect

import pytest

from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.boundary import guarded
from slime_core.protocols import RolloutTraits


def broken(args: object, samples: object) -> None:
    raise KeyError("score")


async def broken_async(args: object) -> None:
    raise ValueError("no")


def test_the_error_names_setting_and_line() -> None:
    call = guarded(broken, "--custom-reward-post-process-path (flag) 'pp.py'")
    with pytest.raises(PluginError, match=r"'pp.py' raised KeyError: 'score' \(at .*test_boundary\.py:\d+\)"):
        call(None, [])
    assert list(inspect.signature(call).parameters) == ["args", "samples"]


async def test_async_functions_stay_async() -> None:
    call = guarded(broken_async, "rollout")
    assert inspect.iscoroutinefunction(call)
    with pytest.raises(PluginError, match="rollout raised ValueError: no"):
        await call(None)


def test_slimes_own_errors_pass() -> None:
    def refuses() -> None:
        raise ConfigError("use another")

    with pytest.raises(ConfigError, match="use another"):
        guarded(refuses, "hook")()


def test_attributes_and_callables_that_are_no_functions() -> None:
    class Rollout:
        traits = RolloutTraits(needs_engine=False)

        def __call__(self, args: object) -> int:
            return 3

    call = guarded(Rollout(), "rollout")
    assert call(None) == 3
    assert guarded(max, "builtin")(1, 2) == 2
