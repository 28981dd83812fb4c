"""Build the modules of the neighbouring stubs: any name can be imported, and raises when it is called."""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn


def names_of(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a stub's module."""

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            package = module.partition(".")[0]
            raise NotImplementedError(f"{module}.{name} was called, but only slime's stub of {package} is there")

        missing.__name__ = name
        return missing

    return attribute


def module(name: str, **known: Any) -> types.ModuleType:
    """Create a module below a stub and make it importable; `known`: its contents."""
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__dict__.update(known, __getattr__=names_of(name))
    sys.modules[name] = made
    return made
