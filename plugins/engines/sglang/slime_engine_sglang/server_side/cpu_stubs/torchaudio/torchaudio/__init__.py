"""Stands for torchaudio where it is not installed: SGLang imports it for audio, and text models never call it."""

import importlib.machinery
import sys
import types
from typing import Any, NoReturn

__version__ = "0.0.0+slime.stub"


def _module(name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__path__ = []
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def attribute(attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{name}.{attr} was called, but only slime's stub of torchaudio is there")

        return missing

    made.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = made
    return made


functional, transforms = _module("torchaudio.functional"), _module("torchaudio.transforms")
compliance = _module("torchaudio.compliance")
compliance.kaldi = _module("torchaudio.compliance.kaldi")  # type: ignore[attr-defined]
