"""Turn a Python function, class or object into a spec that every process of a run can resolve.

A worker process resolves a reward from a string, so an object needs a place to be found::

    importable                 "package.module:name", or "/path/file.py:name"
    not importable             cloudpickle into a file of the run: "/run/inputs/functions/reward_3f2a.py:reward"
    not to be pickled either   "slime_python.here:reward_3f2a": this process only, on a thread

The last form cannot be killed when it hangs, and a warning says so.
"""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_core import hookimpl
from slime_core.errors import ConfigError, did_you_mean
from slime_core.plugins.hooks import hook_specs
from slime_core.plugins.hookspecs import PROJECT
from slime_core.protocols import Args, RewardTraits
from slime_python import here

logger = logging.getLogger(__name__)

_FILE = '''"""The {kind} {label}, given as a Python object; its source was:

{source}
"""

import base64
import pickle
import sys

for place in {places!r}:  # modules that the object imports lie there
    if place not in sys.path:
        sys.path.append(place)
{kind} = pickle.loads(base64.b85decode(
    {data!r}
))
'''


def spec_of(kind: str, given: Any, folder: Path) -> str:
    """Return the spec of a component.

    Args:
        kind: Word for messages and file names: "reward", "generate", ...
        given: A spec, which is returned as it is; a path of a file; or a function, class or object. An object that
            cannot be called becomes a class whose objects are copies of it, since runs build these components.
        folder: Directory that a pickled object is written into.

    Raises:
        ConfigError: `given` is neither text nor callable.
    """
    if isinstance(given, (str, Path)):
        return str(given)
    if is_plain(given):
        raise ConfigError(
            f"argument {kind} {given!r:.80}: expected a name, a path, or a function, class or object; got"
            f" {type(given).__name__}"
        )
    given = given if callable(given) else _class_of(given)
    return _imported(given) or _pickled(kind, given, folder) or _kept(kind, given)


def is_plain(given: Any) -> bool:
    """Return True for a value of a setting, which is no function, class or object."""
    return given is None or isinstance(given, (str, Path, int, float, bytes, list, tuple, dict, set))


def hook_directory(hooks: Any, folder: Path) -> str:
    """Write hook plugins into a plugin directory and return it.

    Args:
        hooks: Objects, classes or modules with functions marked `@slime_core.hookimpl`; or functions named as hooks.
        folder: Directory to write into.

    Raises:
        ConfigError: An object implements no hook.
    """
    entries = []
    for given in hooks if isinstance(hooks, (list, tuple)) else [hooks]:
        plugin = _hook_plugin(given)
        spec = _imported(plugin) or _pickled("hook", plugin, folder) or _kept("hook", plugin)
        where, _, name = spec.rpartition(":")
        module = Path(where).stem
        if not where.endswith(".py"):
            module = f"hook_{hashlib.sha256(spec.encode()).hexdigest()[:12]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{module}.py").write_text(f"from {where} import {name} as hook\n", encoding="utf-8")
            name = "hook"
        elif Path(where).parent != folder:
            spec = str(_pickled("hook", plugin, folder))
            module, name = Path(spec.rpartition(":")[0]).stem, "hook"
        entries.append(f'{module} = "{module}:{name}"\n')
    text = '[project]\nname = "hooks-of-the-script"\n[project.entry-points."slime.plugins"]\n' + "".join(entries)
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return str(folder)


def _hook_plugin(given: Any) -> Any:
    """Return an object or class with hooks. Raises ConfigError if it has no hook."""
    known = hook_specs()
    if inspect.isfunction(given) and given.__name__ in known:
        return type("Hook", (), {given.__name__: staticmethod(hookimpl(given))})
    if not any(hasattr(getattr(given, name, None), f"{PROJECT}_impl") for name in known):
        hint = did_you_mean(getattr(given, "__name__", ""), known)
        raise ConfigError(
            f"argument hooks {given!r:.80}: no function is marked @slime_core.hookimpl and named like a hook.{hint}"
            f" Hooks: {', '.join(known)}"
        )
    return given


def name_of(given: Any) -> str:
    """Return the qualified name of a function or class, or of an object's class."""
    named = type(given) if _is_object(given) else given
    return str(getattr(named, "__qualname__", type(named).__qualname__))


def _class_of(given: Any) -> type[Any]:
    """Return a class whose objects begin as copies of an object, whatever settings they are built with."""

    class Copied(type(given)):  # type: ignore[misc]
        def __init__(self, args: Args | None = None, *others: Any) -> None:
            try:
                state = copy.deepcopy(vars(given))
            except TypeError:  # a lock, a connection: shared
                state = dict(vars(given))
            self.__dict__.update(state)

    Copied.__name__ = type(given).__name__
    return Copied


def _imported(given: Any) -> str | None:
    """Return the import path or file of an object that another process can import under its name."""
    module, name = str(getattr(given, "__module__", "__main__")), name_of(given)
    if module == "__main__" or "<" in name or module not in sys.modules:
        return None
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
        spec = importlib.util.find_spec(module)
    except (AttributeError, ImportError, ValueError):
        return None
    if found is not given or spec is None or not spec.origin:
        return None
    file = Path(spec.origin)
    if "." not in module and file.suffix == ".py" and "site-packages" not in file.parts:
        return f"{file.resolve()}:{name}"  # a module beside a script, whose folder other processes do not search
    return f"{module}:{name}"


def _pickled(kind: str, given: Any, folder: Path) -> str | None:
    """Write the object into a file of Python and return its spec; None if it cannot be pickled."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(given)
    except Exception as error:  # pickling runs code of any object in a closure
        logger.info("argument %s: not pickled: %s: %s", kind, type(error).__name__, error)
        return None
    text = base64.b85encode(data).decode()
    installed = (sys.prefix, sys.base_prefix)
    places = [place or os.getcwd() for place in sys.path if not place.startswith(installed)]
    body = _FILE.format(kind=kind, label=name_of(given), source=_source(given), data=text, places=places)
    path = folder / f"{kind}_{hashlib.sha256(data).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(body, encoding="utf-8")
    return f"{path}:{kind}"


def _source(given: Any) -> str:
    """Return the source of an object for people, safe within a docstring; a note if it is not known."""
    try:
        source = inspect.getsource(given if not _is_object(given) else type(given))
    except (OSError, TypeError):
        return "(not known)"
    return source.replace("\\", "\\\\").replace('"""', r"\"\"\"")


def _is_object(given: Any) -> bool:
    return not (inspect.isfunction(given) or inspect.ismethod(given) or inspect.isclass(given))


def _kept(kind: str, given: Any) -> str:
    """Keep the object in this process and return the spec that finds it here."""
    cost = " and cannot be ended when it hangs" if kind == "reward" else ""
    logger.warning(
        "argument %s %r: neither importable nor picklable, so it runs on a thread of this process%s", kind, given, cost
    )
    return here.keep(kind, _on_thread(given) if kind == "reward" else given, name_of(given))


def _on_thread(reward: Any) -> Any:
    """Return the reward with the trait that keeps it in this process."""
    if inspect.iscoroutinefunction(reward):
        return reward
    if inspect.isclass(reward):
        return type(reward.__name__, (reward,), {"traits": RewardTraits(execution="thread")})
    called: Callable[..., Any] = reward.__call__ if _is_object(reward) else reward

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        return reward(*args, **kwargs)

    vars(call)["traits"] = RewardTraits(execution="thread")
    return call
