"""What one row of the table of kinds says, and one accepted way to call a component.

`kinds.py` is the table; its rows are in `kinds_table.py`, with those of flags that take a function. A `HookFlag` stands
beside the hook that its function implements (`hookspecs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slime_core.protocols.traits import Traits

FUNCTIONS = "functions"
"""The kind of what has no kind but the flag that it is for."""


@dataclass(frozen=True)
class Call:
    """One accepted way to be called."""

    shown: str
    """The signature as error messages print it: names are passed by position, those after `*` by name, and those in
    brackets by name to callables that declare a parameter of that name."""
    marker: str | None = None
    """The call applies only to callables with a positional parameter of this name."""
    awaited: bool = False
    """The callable must be `async def`, or annotated to return an awaitable."""
    plain: bool = False
    """The callable must not be `async def`: nobody would await what it returns."""

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments, passed by position."""
        return _names(self._always.partition("*, ")[0])

    @cached_property
    def named(self) -> tuple[str, ...]:
        """Always passed, by name."""
        return _names(self._always.partition("*, ")[2])

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Passed as well to callables that declare a parameter of that name."""
        return tuple(re.findall(r"\[, (\w+)\]", self._inner))

    @property
    def _inner(self) -> str:
        return self.shown.partition("(")[2].partition(")")[0]

    @property
    def _always(self) -> str:
        return re.sub(r"\[[^]]*\]", "", self._inner)


def _names(text: str) -> tuple[str, ...]:
    """Those without a default; `self` and `**kwargs` are none."""
    return tuple(word for word in map(str.strip, text.split(",")) if word.isidentifier() and word != "self")


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    """Plural, e.g. "rewards"."""
    flags: tuple[str, ...]
    """Settings that select a component of this kind."""
    canonical: tuple[str, ...]
    """Attributes looked for in a `file.py` spec that names none, best first."""
    word: str = ""
    """Singular, where it is not the plural without its ending."""
    calls: tuple[Call, ...] = ()
    """Accepted calls of a function; empty when the kind takes classes only, or any function at all."""
    methods: Mapping[str, Call] = field(default_factory=dict)
    """Methods a class must have."""
    construct: Call | None = None
    """How a class is built; None when the kind takes functions only."""
    instance: str = ""
    """Name in `slime_core.protocols` of the class that the object is an instance of, which has the code as `run`."""
    lists: bool = False
    """A list or tuple of such objects is one component too."""
    traits: type[Traits] | None = None
    """What a component of this kind may declare of itself."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a registered name -> `module:attr` of what wraps the component: `boxed_math` is `math` boxed."""
    api: int = 1
    """Raised when a component that fits would not fit any more (`compat.check_api`)."""
    deprecated: tuple[int, ...] = ()
    """Versions before `api` that are still loaded, with a warning: for one release."""

    @property
    def singular(self) -> str:
        """As messages and distributions call it."""
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
    """One flag whose function has the signature that the row says."""

    @property
    def setting(self) -> str:
        """What holds the function's path, or a list of paths."""
        return self.flags[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class FunctionFlag(_Flag):
    """A flag whose function takes the place of one step; installed ones of all such flags share one group of names."""

    @property
    def registered(self) -> str:
        """See `Kind.registered`."""
        return FUNCTIONS


@dataclass(frozen=True)
class HookFlag(_Flag):
    """A flag whose function implements one hook, which `name` is; it is named by path, since it has no names."""

    trains: bool = False
    """The moment comes only where something is trained."""

    @property
    def may_wait(self) -> bool:
        """Whoever calls the hook awaits what it returns, and deals with what it raises."""
        return not self.calls[0].plain


BUILT_FROM_ARGS = Call("(args)")
BUILT_BY_NAME = Call("(args)")
"""A constructor may ask for more than the settings (`signatures.construct`)."""
