"""`slime doctor`: find problems of the plugins in this environment, each with a fix.

The command reads metadata first and then loads every component, so unlike a run it also finds errors in plugins that
are not selected. An error here need not stop the current run: a broken component stops only the runs that select it. A
broken hook plugin, directory or allow-list stops every run.
"""

from __future__ import annotations

import csv
import importlib.machinery
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from slime_sandbox_local import SandboxError, require_isolation

from slime_commands.plugins.checking import missing_requirements
from slime_core.distributions import ALLOW_VARIABLE, BUNDLE, CORE, GROUP_PREFIX, installed, safe_mode
from slime_core.errors import PluginError, PluginIncompatibleError, PluginLoadError, PluginSignatureError
from slime_core.plugins.discovery import PLUGIN_DIR_VARIABLE, add_directory
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.plugins.manager import load_hook_module
from slime_core.plugins.registry import RANK_CHECKOUT, ComponentRef, Registry
from slime_core.plugins.resolve import resolve


@dataclass(frozen=True)
class Finding:
    """A problem that the doctor found, and its fix."""

    level: Literal["error", "warning"]
    """Severity; "error" if some run would not start."""
    topic: str
    """Kind of the problem: broken, conflicting, incompatible, shadowed, ..."""
    what: str
    way_out: str
    """Command or action that fixes the problem."""
    stops: str = field(default="", compare=False)
    """Runs that the problem stops."""


def examine(registry: Registry) -> list[Finding]:
    """Return all problems, the most severe first."""
    found = [
        *_allow_list(registry),
        *_directories(),
        *_problems(registry),
        *_conflicts(registry),
        *_loading(registry),
        *_requirements(registry),
        *_duplicate_hooks(registry),
        *_shadowed_copies(registry),
        *_shadowed_modules(registry),
        *_stale(registry),
        *_core_files(),
        *_namesakes(),
        *_sandbox(),
    ]
    return sorted(dict.fromkeys(found), key=lambda finding: finding.level != "error")


def _allow_list(registry: Registry) -> Iterator[Finding]:
    if unknown := registry.not_found():
        yield Finding(
            "error",
            "allow-list",
            f"{ALLOW_VARIABLE} names no plugin: {', '.join(unknown)}",
            f"unset {ALLOW_VARIABLE}, or take names from `slime plugins list`",
            "every run",
        )


def _directories() -> Iterator[Finding]:
    parts = [part for part in os.environ.get(PLUGIN_DIR_VARIABLE, "").split(os.pathsep) if part]
    if safe_mode() and parts:
        where = ", ".join(parts)
        yield Finding("warning", "directory", f"not searched in safe mode: {where}", "leave out --no-plugins")
        return
    for part in parts:
        directory = Path(part)
        found = Registry()
        if directory.is_dir():
            add_directory(found, directory)
        if list(found) or found.problems:
            continue
        reason = "holds no plugin" if directory.is_dir() else "is not a directory"
        yield Finding(
            "error",
            "directory",
            f"{directory} (--plugin-dir / {PLUGIN_DIR_VARIABLE}) {reason}",
            f"remove it from {PLUGIN_DIR_VARIABLE}, or: slime plugins new rewards mine --dir {directory}",
            "every run",
        )


def _problems(registry: Registry) -> Iterator[Finding]:
    for problem in registry.problems:
        yield Finding("warning", "unusable", f"{problem.where}: {problem.message}", "correct it there, and reinstall")


def _conflicts(registry: Registry) -> Iterator[Finding]:
    by_name: dict[tuple[str, str], list[ComponentRef]] = {}
    for ref in registry:
        by_name.setdefault((ref.kind, ref.name), []).append(ref)
    for (kind, name), refs in by_name.items():
        if len(refs) < 2:
            continue
        who = " and ".join(f"{ref.origin} ({ref.target})" for ref in refs)
        removal = f"pip uninstall {refs[-1].distribution or refs[-1].name}"
        if kind == HOOK_GROUP:
            way, stops = f"{removal}, or {ALLOW_VARIABLE}={refs[0].distribution}:{name}", "every run"
            yield Finding("error", "conflicting", f"hook plugin {name!r} is offered by {who}", way, stops)
            continue
        way = f"select it as {' or '.join(f'{ref.distribution}:{name}' for ref in refs)}, or {removal}"
        what = f"{kind} plugin {name!r} is offered by {who}"
        yield Finding("error", "conflicting", what, way, f"runs that select {name!r}")


_TOPICS: tuple[tuple[type[PluginError], str], ...] = (
    (PluginIncompatibleError, "incompatible"),
    (PluginSignatureError, "signature"),
    (PluginLoadError, "broken"),
)


def _loading(registry: Registry) -> Iterator[Finding]:
    """Load every component and yield the errors."""
    for ref in registry:
        is_hook = ref.kind == HOOK_GROUP
        try:
            if is_hook:
                load_hook_module(ref)
            else:
                resolve(ref.kind, f"{ref.distribution}:{ref.name}" if ref.distribution else ref.name, registry=registry)
        except PluginError as error:
            topic = next((word for kind, word in _TOPICS if isinstance(error, kind)), "broken")
            stops = "every run, unless --no-plugins is given" if is_hook else f"runs that select {ref.name!r}"
            yield Finding("error", topic, str(error), _way_out(ref), stops)


def _way_out(ref: ComponentRef) -> str:
    remedy = f"edit {ref.folder}" if ref.folder else f"{ref.install_hint}, or pip uninstall {ref.distribution}"
    return f"{remedy}; then: slime plugins check {ref.folder or ref.distribution}"


def _distributions(registry: Registry) -> dict[str, ComponentRef]:
    return {ref.distribution: ref for ref in registry if ref.distribution}


def _requirements(registry: Registry) -> Iterator[Finding]:
    """Yield requirements of a plugin's distribution that are not met."""
    for distribution, ref in _distributions(registry).items():
        for requirement, found in missing_requirements(ref):
            has = f"{found} is installed" if found else "it is not installed"
            yield Finding(
                "error",
                "requirement",
                f"{distribution} {ref.version} needs {requirement}, but {has}",
                ref.install_hint,
                f"runs that select a plugin of {distribution}",
            )


def _duplicate_hooks(registry: Registry) -> Iterator[Finding]:
    """Yield hook modules that are registered twice, and so are called twice for each event."""
    seen: dict[str, ComponentRef] = {}
    for ref in registry:
        if ref.kind != HOOK_GROUP:
            continue
        first = seen.setdefault(ref.target, ref)
        if first is not ref:
            what = f"hook module {ref.target} is registered by {first.label} and by {ref.label}; it is called twice"
            yield Finding("warning", "duplicate", what, f"pip uninstall {ref.distribution}, or remove one entry point")


def _shadowed_copies(registry: Registry) -> Iterator[Finding]:
    for used, other in registry.shadowed:
        same_place = RANK_CHECKOUT in (used.rank, other.rank) or used.rank == other.rank
        if same_place and used.version == other.version:
            continue  # a checkout and its editable install, or a folder that is twice on sys.path
        yield Finding(
            "warning",
            "shadowed",
            f"{used.kind}/{used.name}: {_copy(used)} is used, {_copy(other)} is not",
            f"if that is not what you want: leave out that --plugin-dir, or pip uninstall {other.distribution}",
        )


def _copy(ref: ComponentRef) -> str:
    return f"{ref.origin} in {ref.folder}" if ref.folder else f"{ref.origin} (installed)"


def _shadowed_modules(registry: Registry) -> Iterator[Finding]:
    """Yield modules hidden by files in a plugin's folder, which is first in `sys.path`, or in the working directory."""
    folders = {
        (ref.folder / "src" if (ref.folder / "src").is_dir() else ref.folder): ref.label
        for ref in registry
        if ref.folder is not None and ref.rank != RANK_CHECKOUT
    }
    for folder, label in folders.items():
        for name in _modules_in(folder):
            hidden = _found_elsewhere(name, folder, folders)
            if hidden:
                what = f"{folder / name} hides {hidden} once {label} is loaded"
                yield Finding("warning", "shadowed", what, f"rename it, or move the package of {label} below src/")
    if (cwd := Path.cwd()) not in folders:
        for name in _modules_in(cwd) if sys.path and sys.path[0] in ("", str(cwd)) else ():
            hidden = _found_elsewhere(name, cwd, folders)
            if hidden:
                way = "rename it, or start the command `slime` instead of `python -m`"
                yield Finding("warning", "shadowed", f"{cwd / name} hides {hidden}", way)


def _modules_in(folder: Path) -> list[str]:
    files = [file.stem for file in folder.glob("*.py") if file.stem not in ("conftest", "setup", "__init__")]
    return sorted(files + [file.parent.name for file in folder.glob("*/__init__.py")])


def _found_elsewhere(name: str, folder: Path, folders: Iterable[Path]) -> str:
    """Return the place of another module with that name; empty if it is the only one."""
    if name in sys.stdlib_module_names:
        return f"the standard library's {name!r}"
    skip = {str(folder), "", *map(str, folders)}
    path = [entry for entry in sys.path if entry not in skip and not (not entry and folder == Path.cwd())]
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.origin is None or Path(spec.origin).is_relative_to(folder):
        return ""
    return f"the installed {spec.origin}"


def _stale(registry: Registry) -> Iterator[Finding]:
    for distribution, reason, command in stale_installs():
        yield Finding("warning", "stale", f"{distribution} is installed editable, but {reason}", command)


_NAMESAKES = {
    "slime": "THUDM/slime's, or a stranger's of the package index",
    "slime-core": "a stranger's of the package index",
}
"""Distributions that count as slime's own."""


def _namesakes() -> Iterator[Finding]:
    for name, whose in _NAMESAKES.items():
        if (dist := installed(name)) is not None:
            what = f"{name} {dist.version} is installed, which is {whose}; slime's are {CORE} and {BUNDLE}"
            hides = " (it and slime-compat have the same import name)" if installed("slime-compat") else ""
            yield Finding("warning", "namesake", what + hides, f"unless you want it: pip uninstall {name}")


def _sandbox() -> Iterator[Finding]:
    """Yield a warning if programs written by a model cannot be isolated completely."""
    try:
        require_isolation("require")
    except SandboxError as error:
        what, _, way = str(error).partition(". ")
        stops = "runs that execute a model's programs, unless the --sandbox-isolation that is named suffices"
        yield Finding("warning", "sandbox", what, way or "docs/how-to/sandbox.md", stops)


def _core_files() -> Iterator[Finding]:
    """Yield missing files of slime_core, and files that pip would remove with a slime-rl older than the core's package.

    If all files are missing, this check cannot run: see CHANGELOG.md for the command.
    """
    core, bundle = installed(CORE), installed(BUNDLE)
    if core is None:
        return
    whole = f"pip install --force-reinstall --no-deps {CORE}=={core.version}"
    # Since Python 3.12, `core.files` omits missing files.
    recorded = (PurePosixPath(row[0]) for row in csv.reader((core.read_text("RECORD") or "").splitlines()))
    files = [file for file in recorded if file.parts[0] == "slime_core" and file.suffix != ".pyc"]
    gone = [file for file in files if not Path(str(core.locate_file(file))).is_file()]
    if gone:
        what = f"{len(gone)} of {len(files)} files of {CORE} {core.version} are gone, such as {gone[0]}"
        yield Finding("error", "core", what, whole, "every run that needs them")
    if bundle is not None and (shared := set(files) & set(bundle.files or ())):
        what = f"{BUNDLE} {bundle.version} has {len(shared)} of {CORE}'s files, which pip deletes with it"
        yield Finding("warning", "core", what, f"pip uninstall {BUNDLE}, then: {whole}, then: pip install {BUNDLE}")


def stale_installs() -> Iterator[tuple[str, str, str]]:
    """Yield (distribution, problem, command) for every editable plugin whose folder has changed or is missing.

    Entry points are copied at installation: a name added to `pyproject.toml` since then is unknown, and a removed name
    is still known.
    """
    for dist in metadata.distributions():
        folder = _editable_folder(dist)
        if folder is None or not any(entry.group.startswith(GROUP_PREFIX) for entry in dist.entry_points):
            continue
        if not folder.is_dir():
            yield dist.name, f"its folder {folder} is gone", f"pip uninstall {dist.name}"
            continue
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
        except (OSError, ValueError):
            continue
        for reason in _differences(dist, project):
            yield dist.name, reason, f"pip install --no-deps -e {folder}"


def _editable_folder(dist: metadata.Distribution) -> Path | None:
    text = dist.read_text("direct_url.json")
    try:
        facts = json.loads(text or "{}")
    except ValueError:
        return None
    if not facts.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(facts.get("url", "")).path))


def _differences(dist: metadata.Distribution, project: dict[str, Any]) -> Iterator[str]:
    known = {
        (entry.group, entry.name, entry.value) for entry in dist.entry_points if entry.group.startswith(GROUP_PREFIX)
    }
    tables = project.get("entry-points", {})
    declared = {
        (group, name, str(target))
        for group, table in tables.items()
        if group.startswith(GROUP_PREFIX)
        for name, target in table.items()
    }
    changed = sorted({f"{group}:{name}" for group, name, _ in known ^ declared})
    if changed:
        yield f"its entry points have changed since: {', '.join(changed)}"
    version = project.get("version")
    if version is not None and str(version) != dist.version:
        yield f"its version is {version} by now, installed as {dist.version}"
