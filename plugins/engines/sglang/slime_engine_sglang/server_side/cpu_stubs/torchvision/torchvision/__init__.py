"""Stands for torchvision where it is not installed: SGLang imports it for images, and text models never call it."""

import enum
import importlib.machinery
import sys
import types
from typing import Any, NoReturn

__version__ = "0.0.0+slime.stub"
InterpolationMode = enum.Enum(
    "InterpolationMode",
    {name.upper(): name for name in ("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos")},
)


def _module(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def attribute(attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)
        if attr == "InterpolationMode":
            return InterpolationMode

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{name}.{attr} was called, but only slime's stub of torchvision is there")

        return missing

    made.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = made
    return made


io, ops, transforms = _module("torchvision.io"), _module("torchvision.ops"), _module("torchvision.transforms")
transforms.functional = _module("torchvision.transforms.functional")  # type: ignore[attr-defined]
transforms.v2 = _module("torchvision.transforms.v2")  # type: ignore[attr-defined]
transforms.v2.functional = _module("torchvision.transforms.v2.functional")
