"""Check before a run starts that every process has the driver's code: plugins and slime itself.

The driver computes `fingerprint(run.plugins)`; every actor returns its own after it has resolved the same settings.
Files are compared by content, not by path.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import slime_core
from slime_core.distributions import CORE
from slime_core.errors import ConfigError
from slime_core.plugins.resolve import absolute_spec

Fingerprint: TypeAlias = dict[str, dict[str, str]]
"""Name of a component or package -> {"distribution", "version", "source hash"}."""
_SHOWN = 12


def fingerprint(plugins: Iterable[Mapping[str, Any]], names: Mapping[str, str] | None = None) -> Fingerprint:
    """Return the fingerprint of this process.

    Args:
        plugins: Provenance of every component and hook plugin in use (`Prepared.plugins`).
        names: Name here -> the driver's name, for files copied to this node; other files have absolute names.
    """
    names = names or {}
    found = {
        f"{p['kind']} {names.get(str(p['name']), absolute_spec(str(p['name'])))!r}": {
            "distribution": str(p["distribution"] or "none"),
            "version": str(p["version"] or "none"),
            "source hash": str(p["sha256"] or "none"),
        }
        for p in plugins
    }
    return found | {CORE: {"version": slime_core.__version__}, "Python": {"version": platform.python_version()}}


def differences(here: Fingerprint, there: Fingerprint) -> list[str]:
    """Return one line per difference, beginning with the driver's components."""
    lines = [f"{what} is not there" for what in sorted(here.keys() - there.keys())]
    lines += [f"{what} is only there" for what in sorted(there.keys() - here.keys())]
    for what in sorted(here.keys() & there.keys()):
        mine, theirs = here[what], there[what]
        changed = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
        shown = [f"{key} {_short(mine.get(key))} here, {_short(theirs.get(key))} there" for key in changed]
        lines += [f"{what}: {', '.join(shown)}"] if shown else []
    return lines


def check_same_code(driver: Fingerprint, actors: Sequence[tuple[str, str, Fingerprint]]) -> None:
    """Compare the driver with every actor.

    Args:
        driver: Fingerprint of the driver.
        actors: (name, host, fingerprint) of each actor.

    Raises:
        ConfigError: Some actors have other code; one message lists all differences.
    """
    by_host: dict[str, tuple[list[str], list[str]]] = {}
    for name, host, theirs in actors:
        lines = differences(driver, theirs)
        if lines:
            names, known = by_host.setdefault(host, ([], []))
            names.append(name)
            known += [line for line in lines if line not in known]
    if not by_host:
        return
    parts = [f"{host} ({', '.join(names)}): {'; '.join(lines)}" for host, (names, lines) in sorted(by_host.items())]
    raise ConfigError(
        "the nodes do not have the code that this command has, so results would depend on where a stage runs;"
        " install the same versions and files on them:\n" + "\n".join(parts)
    )


def _short(value: str | None) -> str:
    return "none" if value is None else value[:_SHOWN]
