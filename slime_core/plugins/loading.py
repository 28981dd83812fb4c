"""Import the code behind a spec or a ref, and report errors at the place where they occurred.

Called by the resolver and by the hook manager. An ImportError raised inside a user's module is never reported as "no
such module", but with that module's own file and line.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginLoadError, PluginNotFoundError
from slime_core.plugins.kind import Kind

if TYPE_CHECKING:
    from slime_core.plugins.registry import ComponentRef

logger = logging.getLogger(__name__)


def import_module(name: str, subject: str) -> ModuleType:
    """Import a dotted module; `subject` begins the error messages.

    Raises:
        PluginNotFoundError: There is no such module.
        PluginLoadError: Importing it raised.
    """
    try:
        with _same_directory(subject):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if (name == missing or name.startswith(f"{missing}.")) and not _users_frames(error):
            raise PluginNotFoundError(f"{subject}: no module {missing!r}{_module_hint(name)}") from error
        raise _load_error(subject, name, error) from error
    except (Exception, SystemExit) as error:
        raise _load_error(subject, name, error) from error


def import_file(path: Path, subject: str) -> ModuleType:
    """Load a `.py` file once; its module is in `sys.modules` under a name derived from the absolute path.

    The file's folder is appended to `sys.path`, so that it can import its neighbours.

    Raises:
        PluginNotFoundError: There is no such file.
        PluginLoadError: Running it raised.
    """
    if not path.is_file():
        raise PluginNotFoundError(f"{subject}: no file {path}")
    path = path.resolve()
    name = f"slime_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:10]}"
    if name in sys.modules:
        return sys.modules[name]
    search_also(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _same_directory(subject):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _load_error(subject, str(path), error) from error
    return module


@contextlib.contextmanager
def _same_directory(subject: str) -> Iterator[None]:
    """Undo a change of the working directory by imported code, because users' paths are relative to it."""
    directory = os.getcwd()
    try:
        yield
    finally:
        if os.getcwd() != directory:
            logger.warning("%s: importing it changed the working directory, which is changed back", subject)
            os.chdir(directory)


def load_ref(ref: ComponentRef, kind: Kind | None, subject: str) -> tuple[Any, ModuleType]:
    """Import a registered component's target and return the object and its module.

    Raises:
        PluginLoadError: The module or the attribute cannot be loaded; the message names the distribution.
    """
    module_name, _, attr = ref.target.partition(":")
    if ref.folder is not None:
        _search_first(ref.folder / "src" if (ref.folder / "src").is_dir() else ref.folder)
    try:
        module = import_module(module_name.strip(), subject)
        if attr:
            obj = attribute(module, attr.strip(), subject)
        else:
            obj = module if kind is None else canonical_attribute(module, kind, subject)
    except PluginNotFoundError as error:
        raise PluginLoadError(f"{error} (entry point {ref.target!r} of {ref.origin})") from error
    except PluginLoadError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError):
            raise PluginLoadError(f"{error}. To install what it needs: {ref.install_hint}") from cause
        raise
    file = module.__file__
    if ref.folder and file and not Path(file).resolve().is_relative_to(ref.folder.resolve()):
        raise PluginLoadError(
            f"{subject}: module {module_name!r} was imported from {module.__file__}, not from {ref.folder};"
            " another distribution has a module of that name"
        )
    return obj, module


def attribute(module: ModuleType, dotted: str, subject: str) -> Any:
    """Return `module.a.b`. Raises PluginNotFoundError, which lists the module's public callables."""
    try:
        return functools.reduce(getattr, dotted.split("."), module)
    except AttributeError as error:
        listed = ", ".join(public_callables(module)) or "none"
        raise PluginNotFoundError(
            f"{subject}: {module.__file__ or module.__name__} has no {dotted!r}. Public callables there: {listed}"
        ) from error


def canonical_attribute(
    module: ModuleType, kind: Kind, subject: str, fits: Callable[[object], bool] = lambda _: True
) -> Any:
    """Return the object of a `file.py` spec: named like the file or the kind, else the only object that fits.

    Args:
        module: The module of the file.
        kind: Kind with the accepted names, each also with a `custom_` prefix.
        subject: Beginning of the error messages.
        fits: Returns whether an object can be called as its kind is; helper functions in the file cannot.

    Raises:
        PluginNotFoundError: No candidate, or more than one; the message lists them.
    """
    candidates = public_callables(module)
    file = module.__file__ or module.__name__
    stem = Path(file).stem
    own = [stem] if stem in candidates else []
    customs = [f"custom_{name}" for name in (*kind.canonical, kind.singular)]
    named = [name for name in (*own, *customs, *kind.canonical) if hasattr(module, name)]
    fitting = [name for name in candidates if fits(getattr(module, name))]
    # A helper may have such a name. If no object fits, the error message is about the object with the right name.
    best = [name for name in named if fits(getattr(module, name))] or named
    for names in (best[:1], candidates, fitting):
        if len(names) == 1:
            return getattr(module, names[0])
    wanted = " or ".join(kind.canonical[:2])
    if not candidates:
        raise PluginNotFoundError(f"{subject}: {file} defines no public function or class; write one: {wanted}")
    hint = f"name one of them {wanted}, or write" if wanted else "write"
    raise PluginNotFoundError(f"{subject}: {file} defines {', '.join(candidates)}; {hint} {file}:{candidates[0]}")


def public_callables(module: ModuleType) -> list[str]:
    """Return the names of the public functions and classes that the module itself defines, in order."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


def _search_first(folder: Path) -> None:
    """Put a plugin's folder at the start of `sys.path`."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()


def search_also(folder: Path) -> None:
    """Put a folder at the end of `sys.path`, where it cannot shadow other modules."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the traceback's frames outside the import machinery and slime, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    machinery = (__file__, importlib.__file__)
    return [f for f in frames if f.filename not in machinery and not f.filename.startswith("<frozen ")]


def _load_error(subject: str, what: str, error: BaseException) -> PluginLoadError:
    frames = _users_frames(error)
    where = what
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    elif frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        entered = f"{frames[0].filename}:{frames[0].lineno}"
        if entered != where:
            where = f"{where} (imported by {entered})"
    detail = error.msg if isinstance(error, SyntaxError) else str(error)
    return PluginLoadError(f"{subject}: importing {what} failed at {where}: {type(error).__name__}: {detail}")


def _module_hint(name: str) -> str:
    """Return a hint for the user if the module is a file in the working directory."""
    file = Path(os.getcwd(), *name.split(".")).with_suffix(".py")
    if file.is_file():
        return f". There is a file {file}; write {file}:<function>"
    return ". Install the package that has it, or give the file: path/to/file.py:<function>"
