"""`slime plugins uninstall`: let pip of this interpreter remove distributions that offer plugins, and no others."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from slime_commands.plugins.packages import offers, pip, said_by
from slime_core.distributions import installed, is_own, normalized
from slime_core.errors import ConfigError, PluginError, PluginNotFoundError, did_you_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("names", nargs="+", metavar="DISTRIBUTION", help="as `slime plugins list` shows it under FROM")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(namespace: argparse.Namespace) -> int:
    """Remove the distributions after the user has agreed."""
    names = list(dict.fromkeys(normalized(name) for name in namespace.names))
    for name in names:
        dist, found = _plugin(name)
        if needed := sorted(_needed_by(name) - set(names)):
            raise PluginError(f"{name} is needed by {', '.join(needed)}; uninstall it too")
        print(f"{name} {dist.version}: {', '.join(found)}", flush=True)
    if not namespace.yes and not _agreed():
        print("nothing is uninstalled")
        return 1
    done = pip("uninstall", "--yes", *names)
    if done.returncode:
        raise PluginError(f"pip uninstall {' '.join(names)}: {said_by(done)}")
    print(f"uninstalled {', '.join(names)}")
    return 0


def _agreed() -> bool:
    """Ask. Raises ConfigError if there is no terminal to ask at."""
    if not sys.stdin.isatty():
        raise ConfigError("slime plugins uninstall asks before it removes, and this is no terminal; add --yes")
    return input("uninstall? [y/N] ").strip().lower() in ("y", "yes")


def _plugin(name: str) -> tuple[metadata.Distribution, list[str]]:
    """Return the distribution and its plugins. Raises PluginError for others, and for slime's own."""
    dist = installed(name)
    if dist is None:
        known = [normalized(str(each.name)) for each in metadata.distributions() if offers(each.entry_points)]
        raise PluginNotFoundError(f"{name} is not installed.{did_you_mean(name, known)}")
    if is_own(name):
        raise PluginError(f"{name} is slime's own, which runs need; to remove slime itself: pip uninstall {name}")
    found = offers(dist.entry_points)
    if not found:
        raise PluginError(f"{name} {dist.version} is no plugin of slime; to remove it: pip uninstall {name}")
    return dist, found


def _needed_by(name: str) -> set[str]:
    """Return the installed distributions that require this one."""
    found = set()
    for dist in metadata.distributions():
        for text in dist.requires or ():
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if normalized(wanted.name) == name and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
                found.add(normalized(str(dist.name)))
    return found
