"""User code that raises is named, with its line; slime's own errors pass unchanged."""

from __future__ import annotations

import asyncio
import inspect
import signal
from functools import partial

import pytest

from slime_core.errors import ConfigError, PluginError
from slime_core.protocols import RolloutTraits
from slime_core.workers.call import awaited, contained, guarded


def broken(args: object, samples: object) -> None:
    raise KeyError("score")


async def broken_async(args: object) -> None:
    raise ValueError("no")


def test_the_error_names_setting_and_line() -> None:
    call = guarded(broken, "--custom-reward-post-process-path (flag) 'pp.py'")
    with pytest.raises(PluginError, match=r"'pp.py' raised KeyError: 'score' \(at .*test_call\.py:\d+\)"):
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), asyncio.CancelledError(), GeneratorExit()])
async def test_what_is_no_exception_is_the_functions_error_too(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal raises KeyboardInterrupt out of its handler's module; a function raises it out of its own."""
    monkeypatch.setattr(signal, "getsignal", lambda number: print)

    def raises(*args: object) -> None:
        raise error

    async def raises_later() -> None:
        raise error

    if isinstance(error, GeneratorExit):  # a coroutine that is closed
        with pytest.raises(GeneratorExit):
            await awaited("reward 'x'", raises_later())
        return
    said = rf"'x' raised {type(error).__name__}"
    with pytest.raises(PluginError, match=said):
        contained("reward 'x'", raises)
    with pytest.raises(PluginError, match=said):
        await awaited("reward 'x'", raises_later())
    with pytest.raises(PluginError, match=said):
        guarded(raises, "filter 'x'")()


@pytest.mark.parametrize("handler", ["slime_core.launch.drain", "asyncio.runners"])
def test_an_interrupt_by_a_signal_passes(handler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    names = {"__name__": handler}
    exec("def on_signal(*_):\n    raise KeyboardInterrupt", names)
    for call in (partial(contained, "reward 'x'", names["on_signal"]), guarded(names["on_signal"], "filter 'x'")):
        with pytest.raises(KeyboardInterrupt):
            call()
