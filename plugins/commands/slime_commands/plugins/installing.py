"""`slime plugins install`: let pip of this interpreter install plugins, then show and check them.

pip first fetches or builds the wheels alone. A wheel without an entry point of slime's is refused, and nothing has
changed. slime's own distributions keep their versions: a plugin that needs others is refused by pip.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from slime_commands.plugins.packages import (
    Release,
    index,
    offers,
    offers_of_wheel,
    pip,
    release_of_wheel,
    said_by,
    unmet,
)
from slime_commands.plugins.searching import add_index_url
from slime_core.distributions import declared, installed, is_own, own_distributions
from slime_core.errors import PluginConflictError, PluginError, PluginIncompatibleError, PluginNotFoundError
from slime_core.workers.process import python

_CHECK_S = 1200.0
_INDEX_S = 15.0
"""Deadline for asking the index why pip has failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "a name on the index, such as slime-reward-near or slime-reward-near==0.1.0, a wheel, or a folder"
    parser.add_argument("targets", nargs="+", metavar="WHAT", help=text)
    add_index_url(parser)
    parser.add_argument("--no-check", action="store_true", help="leave out `slime plugins check`")


def run(namespace: argparse.Namespace) -> int:
    """Install, then print and check what came; exit status 1 if a check fails."""
    before = {name: dist.version for dist, name, _ in declared()}
    source = ["--index-url", namespace.index_url] if namespace.index_url else []
    with tempfile.TemporaryDirectory(prefix="slime-plugins-") as scratch:
        print(f"getting {' '.join(namespace.targets)}", flush=True)
        wheels = _fetched(namespace, source, Path(scratch))
        print(f"installing {', '.join(f'{new.name} {new.version}' for new in wheels)} and requirements", flush=True)
        kept = [f"{name}=={dist.version}" for name in own_distributions() if (dist := installed(name))]
        kept += [f"{new.name}=={new.version}" for new in wheels]
        constraints = Path(scratch, "constraints.txt")
        constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
        done = pip("install", *source, "--find-links", scratch, "--constraint", str(constraints), *namespace.targets)
        if done.returncode:
            raise PluginError(f"pip install {' '.join(namespace.targets)}: {said_by(done)}")
    importlib.invalidate_caches()
    came = [(name, dist.version, e) for dist, name, e in declared() if before.get(name) != dist.version]
    for name, version, entries in came:
        print(f"installed {name} {version}: {', '.join(offers(entries if isinstance(entries, list) else ()))}")
    sys.stdout.flush()
    return 0 if namespace.no_check else _checked([name for name, _, _ in came])


def _fetched(namespace: argparse.Namespace, source: list[str], scratch: Path) -> list[Release]:
    """Fetch or build the wheels. Raises PluginError unless all are new plugins that fit this slime."""
    done = pip("wheel", "--no-deps", "--wheel-dir", str(scratch), *source, *namespace.targets)
    if done.returncode:
        _explain(namespace)
        raise PluginError(f"pip cannot get {' '.join(namespace.targets)}: {said_by(done)}")
    found = []
    for file in sorted(scratch.glob("*.whl")):
        new = release_of_wheel(file.read_bytes(), file.name)
        shown, there = f"{new.name} {new.version}", installed(new.name)
        if not offers_of_wheel(file):
            raise PluginError(
                f"{shown} is no plugin of slime, since it has no entry point of a group such as slime.rewards; nothing"
                f" is installed. For a package of another kind: pip install {new.name}"
            )
        if is_own(new.name):
            raise PluginError(f"{shown} is slime's own; nothing is installed. For a new slime: pip install -U slime-rl")
        if needed := unmet(new):
            raise PluginIncompatibleError(f"{shown} needs {needed}; nothing is installed")
        if there is not None and there.version == new.version:
            raise PluginConflictError(
                f"{shown} is installed already; give the new one another version, or type first: slime plugins"
                f" uninstall {new.name}"
            )
        found.append(new)
    return found


def _explain(namespace: argparse.Namespace) -> None:
    """Raise PluginError if the index cannot be reached or does not have a project, which pip says in many lines."""
    for target in namespace.targets:
        try:
            name = Requirement(target).name
        except InvalidRequirement:
            continue  # a wheel or a folder
        try:
            index(namespace.index_url, _INDEX_S).newest(name)
        except PluginNotFoundError as error:
            hint = f"for the folder: ./{target}" if Path(target).is_dir() else "slime plugins search lists plugins"
            raise PluginNotFoundError(f"{error}; {hint}") from None


def _checked(names: list[str]) -> int:
    """Run `slime plugins check` in a process that has just started, which sees the new distributions."""
    if not names:
        return 0
    command = [*python(), "-m", "slime_core", "plugins", "check", *names]
    try:
        done = subprocess.run(command, timeout=_CHECK_S)
    except subprocess.TimeoutExpired:
        raise PluginError(f"slime plugins check {' '.join(names)} did not end within {_CHECK_S:g} s") from None
    if done.returncode:
        print(f"to remove it: slime plugins uninstall {' '.join(names)}", file=sys.stderr)
    return done.returncode
