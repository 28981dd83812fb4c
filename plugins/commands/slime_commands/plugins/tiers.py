"""The tier of a plugin, in which `slime plugins check` sums up: how much of it is checked and described.

complete   its contract suite passes, and its types, its documentation and its version range are there
tested     its contract suite passes
loads      it can be selected; no test of a contract ran
broken     a check failed
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from slime_commands.plugins.showing import hooks_of
from slime_core.distributions import BUNDLE, CORE, normalized
from slime_core.plugins.registry import ComponentRef
from slime_core.protocols import Command


def tier(ok: bool, passed: int, lacks: list[str]) -> str:
    """Return the tier of a plugin whose checks ended so, and of whose contract suite this many tests passed."""
    if not ok:
        return "broken"
    if not passed:
        return "loads"
    return "tested" if lacks else "complete"


def lacking(ref: ComponentRef, obj: Any) -> list[str]:
    """Return the lacks of a loaded component that keep it from the tier `complete`."""
    return [*_types(obj), *_documentation(obj), *_version_range(ref)]


def _types(obj: Any) -> Iterator[str]:
    module = inspect.getmodule(_callable(obj))
    top = sys.modules.get((module.__name__ if module else "").partition(".")[0])
    file = getattr(top, "__file__", None)
    if not file or not Path(file).with_name("py.typed").is_file():
        yield "py.typed in its package"
    if bare := [name for name, function in _functions(obj) if _unannotated(function)]:
        yield f"annotations of {', '.join(bare)}"


def _callable(obj: Any) -> Any:
    """Return the function of a command, which is an object that holds it; other components as they are."""
    return obj.run if isinstance(obj, Command) else obj


def _functions(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions that slime may call: public methods of a class, hooks of a module, or the function itself."""
    obj = _callable(obj)
    if inspect.isclass(obj):
        members = {name: value for name, value in vars(obj).items() if not name.startswith("_") or name == "__init__"}
        found = {name: getattr(value, "__func__", value) for name, value in members.items()}
        yield from ((name, value) for name, value in found.items() if inspect.isfunction(value))
    elif inspect.isfunction(obj):
        yield obj.__name__, obj
    else:
        yield from ((name, getattr(obj, name)) for name in hooks_of(obj))


def _unannotated(function: Any) -> bool:
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name not in ("self", "cls")]
    returns = signature.return_annotation is not signature.empty or function.__name__ == "__init__"
    return not returns or any(parameter.annotation is parameter.empty for parameter in parameters)


def _documentation(obj: Any) -> Iterator[str]:
    found = _callable(obj)
    documented = (
        found if inspect.ismodule(found) or inspect.isclass(found) or inspect.isfunction(found) else type(found)
    )
    if not (documented.__doc__ or "").strip():
        yield "a docstring"


def _version_range(ref: ComponentRef) -> Iterator[str]:
    if normalized(ref.distribution) == CORE:
        return
    for text in ref.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if normalized(wanted.name) in (CORE, BUNDLE) and wanted.specifier and wanted.marker is None:
            return
    yield f"a version range of {CORE} in its requirements"
