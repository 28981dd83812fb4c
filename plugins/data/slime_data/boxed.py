r"""`boxed_<name>` wraps any reward so that it gets the content of the last `\boxed{...}` instead of the response.

`plugins.resolve` applies the prefix (`kind.Kind.prefixes`), as THUDM/slime does for its `rm_type`. A response without a
closed box becomes the empty text, not the whole response.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from slime_core.plugins.answers import last_boxed
from slime_core.protocols import RewardTraits, declares, traits_of
from slime_core.sample import Sample


def boxed(reward: Any) -> Any:
    """Wrap a reward so that it receives the content of the box instead of the whole response.

    The result has the same form (function, class or instance; plain or async) and keeps the attributes.
    """
    if inspect.isclass(reward):
        return _boxed_class(reward)
    if hasattr(reward, "compute_reward") or not inspect.isroutine(reward):
        twin = copy.copy(reward)
        twin.__class__ = _boxed_class(type(reward))
        return twin
    return _boxed_samples(reward, 1)


def _boxed_class(cls: type) -> type:
    """Return a subclass whose scoring method receives the content of the box."""
    members: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if hasattr(cls, "compute_reward"):
        members["compute_reward"] = _boxed_texts(cls.compute_reward)
    else:
        members["__call__"] = _boxed_samples(cls.__call__, 2)
    return type(cls.__name__, (cls,), members)


def _boxed_samples(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        given = args[position]
        told = [_told(s) for s in given] if isinstance(given, Sequence) else _told(given)
        return function(*args[:position], told, *args[position + 1 :], **keywords)

    traits = traits_of(function, RewardTraits)
    extract = traits.extract_answer
    if extract is not None:
        return declares(replace(traits, extract_answer=lambda sample: extract(_told(sample))))(call)
    return call


def _boxed_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, prompts: Any, responses: Sequence[str], **keywords: Any) -> Any:
        return function(self, prompts, [last_boxed(text) or "" for text in responses], **keywords)

    return call


def _told(sample: Sample) -> Sample:
    twin = copy.copy(sample)
    twin.response = last_boxed(sample.response) or ""
    return twin
