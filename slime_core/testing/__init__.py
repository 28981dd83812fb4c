"""For plugin authors: an engine that follows a script, a whole run, and the base of contract suites.

The suite of each kind is `slime_testing_contracts`'; one of a kind of your own is a subclass of `Contract`, named by an
entry point `<kind> = "module:Class"` of the group `slime.contracts`. Needs pytest. Loaded lazily (PEP 562): pytest
imports this package in every run of an environment that has slime, for the fixtures and options of `pytest_plugin`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.engines.scripted import CharTokenizer, Reply, Request, ScriptedEngine
    from slime_core.testing.base import Contract, suite_of
    from slime_core.testing.loop import LoopRun

_EXPORTS = {
    "CharTokenizer": "slime_core.engines.scripted",
    "Contract": "slime_core.testing.base",
    "LoopRun": "slime_core.testing.loop",
    "Reply": "slime_core.engines.scripted",
    "Request": "slime_core.engines.scripted",
    "ScriptedEngine": "slime_core.engines.scripted",
    "suite_of": "slime_core.testing.base",
}

__all__ = ["CharTokenizer", "Contract", "LoopRun", "Reply", "Request", "ScriptedEngine", "suite_of"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name.endswith(("Contract", "Service")):  # an ImportError, since `from` leaves out what an AttributeError says
        raise ImportError(f"slime_core.testing has no {name}; type: from slime_testing_contracts import {name}")
    raise AttributeError(f"module 'slime_core.testing' has no attribute {name!r}")
