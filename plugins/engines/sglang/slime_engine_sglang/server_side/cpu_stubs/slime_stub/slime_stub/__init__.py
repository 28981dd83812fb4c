"""What the stubs beside it are made of: modules whose names are imported, and raise when they are called."""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn


def names_of(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of a stub."""

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
    """A module below a stub, importable from now on; `known`: what is in it."""
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__dict__.update(known, __getattr__=names_of(name))
    sys.modules[name] = made
    return made
