"""Classes for a row of the table of kinds (`Kind`) and an accepted signature of a component (`Call`).

`kinds.py` holds the table; its rows, including the rows of flags that take a function, are in `kinds_table.py`. A
`HookFlag` is defined next to the hook that its function implements (`hookspecs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slime_core.protocols.traits import Traits

FUNCTIONS = "functions"
"""Kind of functions that belong to one flag and to no other kind."""


@dataclass(frozen=True)
class Call:
    """An accepted signature of a component."""

    shown: str
    """Signature as error messages print it. Names are passed by position, names after `*` by name. Names in brackets
    are passed by name to callables that declare a parameter of that name."""
    marker: str | None = None
    """The call applies only to callables with a positional parameter of this name."""
    awaited: bool = False
    """The callable must be `async def`, or annotated to return an awaitable."""
    plain: bool = False
    """The callable must not be `async def`: its result is not awaited."""

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that are passed by position."""
        return _names(self._always.partition("*, ")[0])

    @cached_property
    def named(self) -> tuple[str, ...]:
        """Names of the arguments that are always passed by name."""
        return _names(self._always.partition("*, ")[2])

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Names of the arguments that are passed only to callables that declare such a parameter."""
        return tuple(re.findall(r"\[, (\w+)\]", self._inner))

    @property
    def _inner(self) -> str:
        return self.shown.partition("(")[2].partition(")")[0]

    @property
    def _always(self) -> str:
        return re.sub(r"\[[^]]*\]", "", self._inner)


def _names(text: str) -> tuple[str, ...]:
    """Return the parameter names without a default, except `self` and `**kwargs`."""
    return tuple(word for word in map(str.strip, text.split(",")) if word.isidentifier() and word != "self")


@dataclass(frozen=True)
class Kind:
    """A row of the table of kinds."""

    name: str
    """Plural, e.g. "rewards"."""
    flags: tuple[str, ...]
    """Settings that select a component of this kind."""
    canonical: tuple[str, ...]
    """Attribute names tried in order for a `file.py` spec without an attribute."""
    word: str = ""
    """Singular, if it is not the plural without its ending."""
    calls: tuple[Call, ...] = ()
    """Accepted signatures of a function; empty if the kind takes classes only, or any function."""
    methods: Mapping[str, Call] = field(default_factory=dict)
    """Methods a class must have."""
    construct: Call | None = None
    """Signature of a class's constructor; None if the kind takes functions only."""
    instance: str = ""
    """Name in `slime_core.protocols` of the class that the object must be an instance of; its code is method `run`."""
    lists: bool = False
    """True if a list or tuple of such objects is also a component."""
    traits: type[Traits] | None = None
    """Class of the traits that a component of this kind may declare."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a registered name -> `module:attr` of its wrapper, e.g. `boxed_math` is `math` wrapped as boxed."""
    api: int = 1
    """Version of the contract, incremented by an incompatible change (`compat.check_api`)."""
    deprecated: tuple[int, ...] = ()
    """Versions before `api` that are still loaded with a warning, for one release."""

    @property
    def singular(self) -> str:
        """Singular name, as in messages and distributions."""
        return self.word or self.name.removesuffix("es" if self.name.endswith("sses") else "s")

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"slime.{self.registered}"

    @property
    def registered(self) -> str:
        """The kind under which names are registered."""
        return self.name


@dataclass(frozen=True)
class _Flag(Kind):
    """A flag whose function must have the signature of this row."""

    @property
    def setting(self) -> str:
        """Name of the setting with the function's path or a list of paths."""
        return self.flags[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class FunctionFlag(_Flag):
    """A flag whose function replaces one step; functions of all such flags are registered in one group."""

    @property
    def registered(self) -> str:
        """See `Kind.registered`."""
        return FUNCTIONS


@dataclass(frozen=True)
class HookFlag(_Flag):
    """A flag whose function implements the hook `name`; the function is given by path, since none are registered."""

    trains: bool = False
    """True if the hook is called only in a run that trains."""

    @property
    def may_wait(self) -> bool:
        """True if the caller of the hook awaits its result and handles its errors."""
        return not self.calls[0].plain


BUILT_FROM_ARGS = Call("(args)")
BUILT_BY_NAME = Call("(args)")
"""Signature of a constructor that may take more parameters than the settings (`signatures.construct`)."""
