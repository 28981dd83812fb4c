"""Find components without importing them: in installed distributions, `--plugin-dir` directories and the checkout.

Each source is the entry points of distributions: from installed metadata (`add_installed`), or from
`[project.entry-points]` in `pyproject.toml` (`add_directory`). A folder's code is added to `sys.path` when a component
of it is loaded, not here.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import slime_core
from slime_core.distributions import CORE, GROUP_PREFIX, AllowList, declared, enter_safe_mode, safe_mode
from slime_core.errors import ConfigError, did_you_mean
from slime_core.plugins.kinds import HOOK_GROUP, HOOKSPECS_GROUP, KINDS
from slime_core.plugins.registry import RANK_CHECKOUT, RANK_EXPLICIT, ComponentRef, Problem, Registry
from slime_core.protocols import Args

PLUGIN_DIR_VARIABLE = "SLIME_PLUGIN_DIR"
"""Variable with directories, separated like PATH; `--plugin-dir` adds to it, so all processes see the same plugins."""

CONTRACTS_GROUP = f"{GROUP_PREFIX}contracts"
"""Kind -> contract suite, read by `slime_testing_contracts.base`."""
_READ_BY_OTHERS = (
    "api",
    "boards",
    "data",
    "failures",
    "fetchers",
    "foreign_flags",
    "metrics",
    "named_models",
    "http_servers",
    "renamed",
    "renderers",
    "signatures",
)
_ELSEWHERE = (*(GROUP_PREFIX + name for name in _READ_BY_OTHERS), HOOKSPECS_GROUP, CONTRACTS_GROUP)
"""Groups of installed distributions that hold no components: `config`, engines and `plugins/hooks.py` read them."""
_GROUPS = {**{kind.group: kind.name for kind in KINDS.values()}, HOOK_GROUP: HOOK_GROUP}
_LAYOUTS = ("pyproject.toml", "*/pyproject.toml", "*/*/pyproject.toml")


def add_installed(registry: Registry) -> None:
    """Add the components of distributions on `sys.path`; unreadable metadata becomes a problem, not an error."""
    for dist, name, entries in declared():
        try:
            if isinstance(entries, Exception):
                raise entries
            owner = ComponentRef("", "", "", name, dist.version, tuple(dist.requires or ()))
        except Exception as error:
            where = str(getattr(dist, "_path", dist))
            registry.problems.append(Problem(where, f"unreadable metadata: {type(error).__name__}: {error}"))
            continue
        _add(registry, owner, ((entry.group, entry.name, entry.value) for entry in entries))
        unknown = dict.fromkeys(entry.group for entry in entries if entry.group not in (*_GROUPS, *_ELSEWHERE))
        registry.problems += [_unknown_group(owner.origin, group) for group in unknown]


def add_directory(
    registry: Registry, directory: Path, rank: int = RANK_EXPLICIT, layouts: Sequence[str] = _LAYOUTS
) -> None:
    """Add the components in the plugin folders of a directory (itself, `*/` and `*/*/`).

    Only `pyproject.toml` files are read; an unreadable one becomes a problem, not an error.
    """
    for file in (file for layout in layouts for file in sorted(directory.glob(layout))):
        try:
            project = _project(file.read_text(encoding="utf-8"))
            owner = _owner(project, file.parent, rank)
            tables = {g: t for g, t in project.get("entry-points", {}).items() if g.startswith(GROUP_PREFIX)}
            entries = [(group, str(n), str(target)) for group, t in tables.items() for n, target in t.items()]
        except (OSError, ValueError, AttributeError, TypeError) as error:
            registry.problems.append(Problem(str(file), f"{type(error).__name__}: {error}"))
            continue
        _add(registry, owner, entries)
        for group in tables.keys() - _GROUPS.keys():
            if group not in _ELSEWHERE:
                registry.problems.append(_unknown_group(str(file), group))
            elif rank != RANK_CHECKOUT:
                registry.problems.append(_needs_installation(file, group))


def _owner(project: Mapping[str, Any], folder: Path, rank: int) -> ComponentRef:
    name = str(project.get("name", folder.name))
    version = slime_core.__version__ if name == CORE else str(project.get("version", ""))
    requires = tuple(str(r) for r in project.get("dependencies", ()))
    return ComponentRef("", "", "", name, version, requires, folder, rank)


@functools.cache  # a run looks for its command first, then for all, and finds the same texts
def _project(text: str) -> dict[str, Any]:
    found: dict[str, object] = tomllib.loads(text).get("project", {})
    return found


def _add(registry: Registry, owner: ComponentRef, entries: Iterable[tuple[str, str, str]]) -> None:
    """Offer the components among (group, name, target) entry points, each as `owner` with these."""
    for group, name, target in entries:
        if group in _GROUPS:
            target = target.partition("[")[0].strip()
            registry.add(replace(owner, kind=_GROUPS[group], name=name, target=target))


def _needs_installation(file: Path, group: str) -> Problem:
    return Problem(
        str(file),
        f"entry points of {group!r} are found in installed distributions only; type: pip install -e {file.parent}",
    )


def _unknown_group(where: str, group: str) -> Problem:
    hint = did_you_mean(group, _GROUPS, form="{!r}") or f" Kinds: {', '.join(KINDS)}"
    return Problem(where, f"entry-point group {group!r} is none of slime's.{hint}")


def checkout_root() -> Path | None:
    """Return the source checkout this slime_core is imported from, or None if it is installed as a wheel."""
    root = Path(slime_core.__file__).resolve().parents[1]
    try:
        project = _project((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return root if project.get("name") == CORE else None


def plugin_directories() -> list[Path]:
    """Return the directories of SLIME_PLUGIN_DIR; none in safe mode. Raises ConfigError if one does not exist."""
    if safe_mode():
        return []
    directories = [Path(part) for part in os.environ.get(PLUGIN_DIR_VARIABLE, "").split(os.pathsep) if part]
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(
                f"--plugin-dir / {PLUGIN_DIR_VARIABLE}: {directory} is not a directory;"
                " expected one with */pyproject.toml or */*/pyproject.toml"
            )
    return [directory.resolve() for directory in directories]


def check_plugin_directories() -> list[str]:
    """Return warnings about unusable contents of the directories of SLIME_PLUGIN_DIR.

    Raises:
        ConfigError: A directory holds nothing that can be used.
    """
    warnings = []
    for directory in plugin_directories():
        found = Registry()
        add_directory(found, directory)
        place = f"--plugin-dir / {PLUGIN_DIR_VARIABLE}: {directory}"
        broken = [f"{problem.where}: {problem.message}" for problem in found.problems]
        if not list(found):
            reason = f": {'; '.join(broken)}" if broken else ""
            raise ConfigError(
                f"{place} holds no plugin{reason}. Expected there, or one or two folders down, a pyproject.toml with"
                ' [project.entry-points."slime.rewards"] or another group of docs/plugins/index.md'
            )
        warnings += [f"{place}: not usable: {reason}" for reason in broken]
    return warnings


def add_plugin_directories(directories: Sequence[str | Path]) -> None:
    """Make `--plugin-dir` directories known to this process and to those it starts. Raises ConfigError for ''."""
    if not directories:
        return  # an empty variable would be read as a setting, by this process's next command and by those it starts
    if "" in directories:
        raise ConfigError("--plugin-dir '': expected a directory; `--plugin-dir .` is the working directory")
    known = [part for part in os.environ.get(PLUGIN_DIR_VARIABLE, "").split(os.pathsep) if part]
    new = [str(Path(directory).expanduser().resolve()) for directory in directories]
    os.environ[PLUGIN_DIR_VARIABLE] = os.pathsep.join([*known, *(d for d in dict.fromkeys(new) if d not in known)])


def search_as(args: Args | None) -> None:
    """Apply `--no-plugins` and `--plugin-dir` of a run to this process and to the processes that it starts."""
    if args is None:
        return
    if args.no_plugins:
        enter_safe_mode()
    add_plugin_directories(args.plugin_dir)


def discovered() -> Registry:
    """Return the allowed components that metadata declares.

    Raises:
        ConfigError: A plugin directory does not exist.
    """
    registry = Registry(AllowList.of())
    add_installed(registry)
    for directory in plugin_directories():
        add_directory(registry, directory)
    if (root := checkout_root()) is not None:
        add_directory(registry, root, RANK_CHECKOUT, layouts=("pyproject.toml",))
        add_directory(registry, root / "plugins", RANK_CHECKOUT)
    return registry
