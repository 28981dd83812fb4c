"""Which plugin answered for each setting, and which hook went to whom: `slime plugins trace`, SLIME_TRACE_PLUGINS.

The resolver notes what it found, the manager lets hook implementations be watched; both cost nothing while no trace is
on. `SLIME_TRACE_PLUGINS=1` prints every hook call as it begins; `start` collects what the command prints. One process
is watched, not those it starts.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy

from slime_core.plugins.registry import ComponentRef

TRACE_VARIABLE = "SLIME_TRACE_PLUGINS"
"""Set to 1 to print every hook call."""


@dataclass
class Answer:
    """One component that a setting named."""

    origin: str
    """Setting and place, e.g. "--rm-type (run.yaml:3)"."""
    ref: ComponentRef
    place: str
    """`file:line`."""
    times: int = 1


@dataclass
class Calls:
    """The calls of one hook in one plugin."""

    times: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    errors: int = 0


@dataclass
class Trace:
    """What has been seen so far."""

    answers: dict[tuple[str, str, str], Answer] = field(default_factory=dict)
    calls: dict[tuple[str, str], Calls] = field(default_factory=dict)
    """(hook, plugin) -> its calls."""


class _Current:
    trace: Trace | None = None


def start() -> Trace:
    """Collect from now on, in this process."""
    _Current.trace = Trace()
    return _Current.trace


def stop() -> None:
    """Collect no more."""
    _Current.trace = None


def note_answer(origin: str, ref: ComponentRef, obj: Any) -> None:
    """The resolver found `obj`."""
    if _Current.trace is None:
        return
    key = (origin, ref.kind, ref.name)
    if key in _Current.trace.answers:
        _Current.trace.answers[key].times += 1
    else:
        _Current.trace.answers[key] = Answer(origin, ref, place_of(obj, ref))


def place_of(obj: Any, ref: ComponentRef) -> str:
    """`file:line` of an object, as far as it can be known."""
    try:
        found = inspect.unwrap(obj) if callable(obj) else obj
        target = found if inspect.isfunction(found) or inspect.isclass(found) else type(found)
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError, ValueError):
        return str(ref.source_file or ref.target)


def announce(manager: pluggy.PluginManager) -> None:
    """Print every call of a hook as it begins, when SLIME_TRACE_PLUGINS asks for it."""
    if os.environ.get(TRACE_VARIABLE, "0") not in ("", "0"):
        manager.add_hookcall_monitoring(_print_call, _print_nothing)


def watch(manager: pluggy.PluginManager) -> None:
    """Time every implementation registered so far, while a trace is on; collecting names is over by then."""
    if _Current.trace is None:
        return
    for name, plugin in manager.list_name_plugin():
        for caller in manager.get_hookcallers(plugin) or () if plugin is not None else ():
            if caller.name == "slime_register_components":
                continue
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    calls = _Current.trace.calls.setdefault((caller.name, name), Calls())
                    implementation.function = _timed(implementation.function, calls)  # type: ignore[misc]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _timed(function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args)
        except BaseException:
            calls.errors += 1
            raise
        finally:
            took = time.perf_counter() - begun
            calls.times += 1
            calls.seconds += took
            calls.slowest = max(calls.slowest, took)

    return call


def _print_call(name: str, implementations: Any, arguments: Any) -> None:
    plugins = ", ".join(implementation.plugin_name for implementation in implementations) or "nobody"
    given = ", ".join(f"{key}={value!r:.60}" for key, value in arguments.items())
    print(f"[plugins] {name}({given}) -> {plugins}", file=sys.stderr)


def _print_nothing(outcome: Any, name: str, implementations: Any, arguments: Any) -> None:
    """Results of hooks are not printed."""
