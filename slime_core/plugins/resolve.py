"""Turn the string a user wrote into the object it names: one grammar for every flag that selects a component.

======================  ====================================================================================
`name`                  registered component of that name
`prefix_name`           the same, wrapped, for the prefixes of the kind: `boxed_math` (`kind.Kind.prefixes`)
`dist:name`             the same, from one distribution; chosen when a distribution of that name offers plugins
`pkg.mod:attr`          import `pkg.mod`, take `attr`
`pkg.mod.attr`          the same, split at the last dot (THUDM/slime's form)
`path/to/file.py`       load the file, take the kind's canonical name, else its only public callable
`file.py:attr`          load the file, take `attr`
======================  ====================================================================================

The form is decided by shape and metadata before anything is imported, never by trying one after the other, so an
ImportError inside a user's module is reported and not hidden. Every stage resolves in its own process from the
string: functions loaded from files do not unpickle elsewhere, so absolute paths travel, not objects.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import slime_core
from slime_core.distributions import CORE, entry_points, normalized, provided
from slime_core.errors import PluginConflictError, PluginIncompatibleError, PluginNotFoundError
from slime_core.plugins.kind import Kind
from slime_core.plugins.kinds import kind_of
from slime_core.plugins.loading import (
    attribute,
    canonical_attribute,
    import_file,
    import_module,
    load_ref,
    public_callables,
    search_also,
)
from slime_core.plugins.manager import OBSERVERS, current_registry
from slime_core.plugins.registry import ComponentRef, Registry, Resolved
from slime_core.plugins.signatures import check_signature, fits, takes_list
from slime_core.protocols import traits_of

logger = logging.getLogger(__name__)

_API = "slime_api"
"""Attribute of a component or its module with the API version of its kind."""
_FILE = re.compile(r"(?P<file>.+\.py)(?::(?P<attr>[A-Za-z_][\w.]*))?")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DIST_NAME = re.compile(r"(?P<dist>[A-Za-z0-9][A-Za-z0-9._-]*):(?P<name>[A-Za-z0-9_-]+)")
_COLON = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<attr>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_DOTTED = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(?P<attr>[A-Za-z_]\w*)")

_GRAMMAR = "name, dist:name, pkg.module:attr, pkg.module.attr, path/to/file.py or path/to/file.py:attr"


def resolve(kind: str, spec: str, *, origin: str = "", registry: Registry | None = None) -> Resolved:
    """Load the component of a kind that `spec` names and check that it can be called as its kind is called.

    Args:
        kind: "rewards", "generators", ... (see `kinds.KINDS`).
        spec: The user's string, in one of the forms above.
        origin: Where the string came from, e.g. "--custom-rm-path (run.yaml)"; begins the error messages.
        registry: Names to look in; by default those discovered in this process.

    Raises:
        PluginNotFoundError: No such name, module, file or attribute.
        PluginConflictError: Two distributions offer the name.
        PluginLoadError: Importing the code raised.
        PluginIncompatibleError: It is written for another version of its kind's API.
        PluginSignatureError: The object does not have its kind's signature.
        PluginError: Its traits are not its kind's.
    """
    row = kind_of(kind)
    spec = spec.strip()
    if prefix := _prefix(row, spec, registry):
        inner = resolve(kind, spec[len(prefix) :], origin=origin, registry=registry)
        wrapped = provided("slime.api", prefix + row.name)(inner.obj)
        ref = replace(inner.ref, prefix=prefix + inner.ref.prefix)
        return Resolved(wrapped, ref, kind, spec, origin)
    obj, ref, module = _load(row, spec, origin, registry)
    obj = _adapted(row, obj)
    check_api(row, obj, module, ref, origin)
    check_signature(row, obj, _subject(row, spec, origin))
    if row.traits is not None:
        traits_of(obj, row.traits, _subject(row, spec, origin))
    found = Resolved(obj, ref, kind, spec, origin)
    for observer in OBSERVERS:
        observer.resolved(found)
    return found


def find(kind: str, spec: str, *, origin: str = "", registry: Registry | None = None) -> ComponentRef | None:
    """Return the registered component that `spec` names, not imported; None if it names a module or a file.

    Raises:
        PluginNotFoundError: The spec has the shape of a name that is not registered, or no known shape.
        PluginConflictError: Two distributions offer the name.
    """
    row = kind_of(kind)
    spec = spec.strip()
    if _FILE.fullmatch(spec):
        return None
    if prefix := _prefix(row, spec, registry):
        inner = find(kind, spec[len(prefix) :], origin=origin, registry=registry)
        return None if inner is None else replace(inner, prefix=prefix + inner.prefix)
    known = registry if registry is not None else current_registry()
    if row.is_hook and not (_COLON.fullmatch(spec) or _DOTTED.fullmatch(spec)):
        raise PluginNotFoundError(
            f"{_subject(row, spec, origin)}: no path of a function; write path/to/file.py, path/to/file.py:attr,"
            " pkg.module:attr or pkg.module.attr. An installed hook plugin is called without a flag"
        )
    try:
        if _NAME.fullmatch(spec):
            return known.get(row.registered, spec)
        if (match := _DIST_NAME.fullmatch(spec)) and _is_distribution(match["dist"], known):
            return known.get(row.registered, match["name"], distribution=match["dist"])
    except (PluginNotFoundError, PluginConflictError) as error:
        raise type(error)(_prefixed(origin, str(error))) from None
    if _COLON.fullmatch(spec) or _DOTTED.fullmatch(spec):
        return None
    raise PluginNotFoundError(f"{_subject(row, spec, origin)}: not a component; write {_GRAMMAR}")


def absolute_spec(spec: str, base: str | Path | None = None) -> str:
    """Return the spec with a file's path made absolute against `base` (by default the working directory)."""
    match = _FILE.fullmatch(spec.strip())
    if match is None:
        return spec
    path = os.path.abspath(os.path.join(base or os.getcwd(), os.path.expanduser(match["file"])))
    return f"{path}:{match['attr']}" if match["attr"] else path


def with_list_function(kind: str, spec: str, origin: str = "") -> str:
    """Return the spec; to a file without a function's name, add its function of a list of samples if it has one.

    Raises:
        PluginNotFoundError: There is no such file.
        PluginLoadError: Running it raised.
    """
    match = _FILE.fullmatch(absolute_spec(spec))
    if match is None or match["attr"]:
        return spec
    row = kind_of(kind)
    module = import_file(Path(match["file"]), _subject(row, spec, origin))

    def scores_lists(found: Any) -> bool:
        return not isinstance(found, type) and fits(row, found) and takes_list(found)

    if not any(scores_lists(getattr(module, name)) for name in public_callables(module)):
        return spec
    chosen = canonical_attribute(module, row, _subject(row, spec, origin), scores_lists)
    return f"{spec}:{chosen.__name__}" if scores_lists(chosen) else spec


def _load(row: Kind, spec: str, origin: str, registry: Registry | None) -> tuple[Any, ComponentRef, ModuleType | None]:
    subject = _subject(row, spec, origin)
    if match := _FILE.fullmatch(absolute_spec(spec)):
        module = import_file(Path(match["file"]), subject)
        if match["attr"]:
            obj = attribute(module, match["attr"], subject)
        else:
            obj = canonical_attribute(module, row, subject, lambda found: fits(row, _adapted(row, found)))
        target = f"{match['file']}:{match['attr'] or getattr(obj, '__name__', '')}"
        return obj, _path_ref(row, spec, target, module), module
    ref = find(row.name, spec, origin=origin, registry=registry)
    if ref is None:
        match = _COLON.fullmatch(spec) or _DOTTED.fullmatch(spec)
        assert match is not None, "find() accepts no other shape"
        search_also(Path.cwd())
        module = import_module(match["module"], subject)
        target = f"{match['module']}:{match['attr']}"
        return attribute(module, match["attr"], subject), _path_ref(row, spec, target, module), module
    if ref.registered is not None:
        return ref.registered, ref, None
    obj, module = load_ref(ref, row, _prefixed(origin, ref.label))
    return obj, replace(ref, source_file=_module_file(module)), module


def _adapted(kind: Kind, obj: object) -> object:
    """Return the object in its kind's form, if a plugin recognises the signature that it has instead."""
    return next((found for adapt in _adapters(kind.name) if (found := adapt(obj)) is not None), obj)


@cache
def _adapters(kind: str) -> list[Callable[[object], object]]:
    """Return the functions that installed distributions offer for a kind in the group `slime.signatures`."""
    allow = current_registry().allow
    return [e.load() for name, e, dist in entry_points("slime.signatures") if name == kind and allow.allows(name, dist)]


def check_api(row: Kind, obj: object, module: ModuleType | None, ref: ComponentRef, origin: str = "") -> None:
    """Check that a component is written for the API version of its kind; log a warning for a deprecated version.

    A plugin names its version by `slime_api = 2` in its class, or in the module that its entry point names; 1 without.
    The versions of slime that a distribution works with are its requirement on slime-rl-core.

    Raises:
        PluginIncompatibleError: It is written for a newer API, or for one that is no longer loaded.
    """
    written = getattr(obj, _API, getattr(module, _API, 1))
    if written == row.api:
        return
    subject = _prefixed(origin, ref.label)
    if type(written) is not int:
        raise PluginIncompatibleError(f"{subject}: {_API} is {written!r}; expected a number, such as {row.api}")
    what = f"{subject} is written for version {written} of the API of {row.name}"
    running = f"{CORE} {slime_core.__version__}"
    if written > row.api:
        raise PluginIncompatibleError(f"{what}, {running} has {row.api}. To have it: pip install --upgrade {CORE}")
    newer = f"To mend it: {ref.install_hint}" if ref.distribution else f"Edit {ref.target}"
    remedy = f"{newer}; docs/plugins/index.md says what has changed, and {_API} = {row.api} that it is done"
    if written not in row.deprecated:
        raise PluginIncompatibleError(f"{what}, {running} has {row.api}. {remedy}")
    _warn(f"{what}, which goes in the next version; {running} has {row.api}. {remedy}")


@cache
def _warn(text: str) -> None:
    """Log a warning once: a run resolves some components for every sample."""
    logger.warning("%s", text)


def _prefix(row: Kind, spec: str, registry: Registry | None) -> str:
    """Return the kind's prefix of `spec`; an empty string if the whole spec is a registered name, or no name."""
    prefix = next((p for p in row.prefixes if spec.startswith(p) and len(spec) > len(p)), "")
    if not prefix or not _NAME.fullmatch(spec):
        return ""
    known = registry if registry is not None else current_registry()
    return "" if known.offers(row.name, spec) else prefix


def _is_distribution(left: str, registry: Registry) -> bool:
    """Return True if `left:name` means a distribution: it offers plugins, or cannot be a module's name."""
    if "-" in left:
        return True
    known = [*registry, *registry.left_out]
    return any(normalized(ref.distribution) == normalized(left) for ref in known if ref.distribution)


def _path_ref(row: Kind, spec: str, target: str, module: ModuleType) -> ComponentRef:
    return ComponentRef(kind=row.name, name=spec, target=target, source_file=_module_file(module))


def _module_file(module: ModuleType) -> Path | None:
    return Path(module.__file__) if module.__file__ else None


def _subject(row: Kind, spec: str, origin: str) -> str:
    return _prefixed(origin, f"{row.singular.replace('_', ' ')} {spec!r}")


def _prefixed(origin: str, text: str) -> str:
    return f"{origin}: {text}" if origin else text
