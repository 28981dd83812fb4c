"""`slime plugins trace -- train ...`: run a command, then show each setting's component and each hook's calls.

Only the command's own process is traced, not its children.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy

from slime_core.errors import ConfigError
from slime_core.plugins.manager import OBSERVERS
from slime_core.plugins.registry import ComponentRef, Resolved
from slime_core.text import table

RUNS = ("train", "sft", "eval", "rollout")
"""Commands that use plugins and end without a signal."""


@dataclass
class Answer:
    """A component that a setting named."""

    origin: str
    """Setting and place, e.g. "--rm-type (run.yaml:3)"."""
    ref: ComponentRef
    place: str
    """Place of the component, `file:line`."""
    times: int = 0


@dataclass
class Calls:
    """The calls of one hook in one plugin."""

    times: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    errors: int = 0


@dataclass
class Trace:
    """Components and hook calls seen so far."""

    answers: dict[tuple[str, str, str], Answer] = field(default_factory=dict)
    calls: dict[tuple[str, str], Calls] = field(default_factory=dict)
    """(hook, plugin) -> its calls."""

    def resolved(self, found: Resolved) -> None:
        """Count the component that was resolved for a setting."""
        key = (found.origin, found.ref.kind, found.ref.name)
        known = self.answers.get(key) or Answer(found.origin, found.ref, place_of(found.obj, found.ref))
        self.answers[key] = replace(known, times=known.times + 1)

    def built(self, manager: pluggy.PluginManager) -> None:
        """Wrap every registered hook implementation with a timer; all plugins are registered by then."""
        for name, plugin in manager.list_name_plugin():
            for caller in manager.get_hookcallers(plugin) or () if plugin is not None else ():
                if caller.name == "slime_register_components":
                    continue
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is plugin:
                        calls = self.calls.setdefault((caller.name, name), Calls())
                        implementation.function = _timed(implementation.function, calls)  # type: ignore[misc]


@contextmanager
def watched() -> Iterator[Trace]:
    """Collect a trace of this process inside the block."""
    trace = Trace()
    OBSERVERS.append(trace)
    try:
        yield trace
    finally:
        OBSERVERS.remove(trace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; everything after `--` is the command line to run."""
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="a command of slime with its flags"
    )


def run(namespace: argparse.Namespace) -> int:
    """Run the command; its exit status. The report goes to standard output, also when the command fails."""
    from slime_core.cli.main import main

    arguments = [*namespace.arguments]
    if arguments[:1] == ["--"]:
        del arguments[0]
    if not arguments or arguments[0] not in RUNS:
        raise ConfigError(
            f"slime plugins trace: name the command to run ({', '.join(RUNS)}), e.g."
            " slime plugins trace -- train --config run.yaml --num-rollout 1"
        )
    with watched() as seen:
        try:
            return main(arguments)
        finally:
            print(report(seen), flush=True)


def report(trace: Trace) -> str:
    """Return two tables: settings with their components, hooks with the plugins that were called."""
    lines = ["components"]
    rows: list[tuple[str, ...]] = [("SETTING", "ANSWERED BY", "FROM", "AT", "TIMES")]
    for answer in trace.answers.values():
        ref = answer.ref
        rows.append((answer.origin or "-", f"{ref.kind}/{ref.name}", ref.origin, answer.place, str(answer.times)))
    lines += table(rows) if len(rows) > 1 else ["none was resolved"]
    lines += ["", "hooks"]
    rows = [("HOOK", "PLUGIN", "CALLS", "TOTAL MS", "SLOWEST MS", "ERRORS")]
    for (hook, plugin), calls in trace.calls.items():
        times = (f"{1e3 * calls.seconds:.2f}", f"{1e3 * calls.slowest:.2f}")
        rows.append((hook, plugin, str(calls.times), *times, str(calls.errors)))
    lines += table(rows) if len(rows) > 1 else ["no hook plugin is loaded"]
    return "\n".join(lines)


def place_of(obj: Any, ref: ComponentRef) -> str:
    """Return `file:line` of an object, as far as it is known."""
    try:
        found = inspect.unwrap(obj) if callable(obj) else obj
        target = found if inspect.isfunction(found) or inspect.isclass(found) else type(found)
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError, ValueError):
        return str(ref.source_file or ref.target)


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
