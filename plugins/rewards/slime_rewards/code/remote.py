"""Remote use of objects between two processes: a `Peer` on each side, and a `Proxy` for each object of the other.

::

    tests: f(x)  --["call", f, x]-->  program: f(x)      a plain value comes back as itself, an object as a reference
                 <--["value", ...]--                     an argument that is a function is called back meanwhile

Both processes run this file's text. The program's side may say what it likes: it answers for its own objects alone.
What it could win by is refused here: an object of its never equals a plain value, is never more or less than one, and
gives no plain value when one is added to it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from decimal import InvalidOperation
from enum import Enum
from json import JSONDecodeError
from typing import Any

from slime_rewards.code.values import base_value, decode, encode

Exchange = Callable[[Any], Any]
"""Function that sends a message and waits for the next message."""


class Refused(BaseException):
    """The other side's answer has an unknown form; `except Exception` in a test does not catch this error."""


_ORDERINGS = ("lt", "le", "gt", "ge")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr, "set": setattr, "del": delattr, "len": len, "iter": iter, "next": next, "str": str, "repr": repr,
    "hash": hash, "bool": bool, "isinstance": isinstance, "issubclass": issubclass, "base": base_value,
    **{name: getattr(operator, name) for name in (
        "eq", *_ORDERINGS, *_OPERATORS, "contains", "getitem", "setitem", "delitem",
    )},
}  # fmt: skip
_ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (*vars(builtins).values(), FrozenInstanceError, InvalidOperation, JSONDecodeError)
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
"""Exception classes known on both sides by name; any other class gets a twin below its first base in this table."""


class Peer:
    """A side of the connection between two processes.

    Args:
        exchange: Sends a message and returns the other side's next message.
        may: Returns whether the other side may do this operation to an object of this side. None allows any operation,
            and trusts the other side's names of standard library functions.
    """

    def __init__(self, exchange: Exchange, may: Callable[[str, list[Any]], bool] | None = None) -> None:
        self.exchange, self.may = exchange, may
        self.scope: dict[str, Any] = {}
        """Objects of this side that the other side may request, by name."""
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}

    def ask(self, name: str, *operands: Any, **keywords: Any) -> Any:
        """Make the other side do an operation and return the result. Raises what it raises there."""
        answer = self.exchange([name, self.write(list(operands)), self.write(keywords)])
        while True:
            try:
                kind, *rest = answer
                if kind == "value":
                    value, changed = map(self.read, rest)
                    if name == "call":
                        _take_over(operands, changed)
                    return value
                error = self._error(*rest) if kind == "raised" else None
            except Exception as wrong:
                raise Refused(f"an answer of no known form: {wrong}") from None
            if error is not None:
                raise error
            answer = self.exchange(self.done(answer))

    def done(self, request: Any) -> Any:
        """Do the operation that the other side requests and return the answer to send."""
        try:
            name, operands, keywords = request[0], self.read(request[1]), self.read(request[2])
            if self.may is not None and not self.may(name, operands):
                raise TypeError(f"an object of the tests does not permit {name!r} to the program")
            if name == "names":
                value: Any = {n: self.scope[n] for n in operands[0] if n in self.scope}
            elif name == "call":
                value = operands[0](*operands[1:], **keywords)
            else:
                value = OPERATIONS[name](*operands)
            return ["value", self.write(value), self._changed(operands, request[1])]
        except BaseException as error:
            return ["raised", *self._raised(error)]

    def _changed(self, operands: list[Any], given: list[Any]) -> list[Any]:
        """Return the form of each operand; None for an operand that did not change."""
        forms = [self.write(operand) if type(operand) in _MUTABLE else None for operand in operands]
        return ["list", *[None if form == before else form for form, before in zip(forms, given[1:])]]

    # -- values ------------------------------------------------------------------------------------------------------

    def write(self, value: Any) -> Any:
        """Return the form of a value; a value that is not plain becomes a reference."""
        return encode(value, self._refer)

    def read(self, form: Any) -> Any:
        """Return the value of a form that the other side sent."""
        return decode(form, self._referred)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Proxy) and value._peer is self:
            return ["yours", value._number]
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._refer_error(value)
        if self.may is not None and (name := _standard(value)):
            return ["standard", *name]
        base = base_value(value)
        scalar = type(base) in (int, float, complex, str, bytes) and not isinstance(value, Enum)
        if base is not value and (scalar or type(value).__module__.partition(".")[0] == "numpy"):
            return self.write(base)
        return ["mine", self._keep(value)]

    def _keep(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return number

    def _refer_error(self, kind: type[BaseException]) -> Any:
        if _ERRORS.get(kind.__name__) is kind:
            return ["error", kind.__name__]
        for number, known in self._proxies.items():
            if known is kind:
                return ["yours", number]
        parents = [base for base in kind.__bases__ if issubclass(base, BaseException)]
        return ["error class", self._keep(kind), kind.__name__, self._refer_error(parents[0])]

    def _referred(self, form: list[Any]) -> Any:
        kind, *rest = form
        if kind == "yours":
            return self._kept[rest[0]]
        if kind == "error":
            return _ERRORS[rest[0]]
        if kind == "standard" and self.may is None:
            return getattr(importlib.import_module(rest[0]), rest[1])
        number = rest[0]
        if number not in self._proxies:
            if kind == "error class":
                self._proxies[number] = _twin(str(rest[1]), self._referred(rest[2]))
            elif kind == "mine" and isinstance(number, int):
                self._proxies[number] = Proxy(self, number)
            else:
                raise ValueError(f"the form of no value: {kind!r:.40}")
        return self._proxies[number]

    def _raised(self, error: BaseException) -> list[Any]:
        try:
            said = str(error)
        except Exception:
            said = ""
        kind = self._refer_error(type(error))
        with contextlib.suppress(Exception):
            return [kind, said, self.write(error.args), self.write(vars(error))]
        return [kind, said, self.write((said,)), self.write({})]

    def _error(self, kind: Any, said: str, arguments: Any, attributes: Any) -> BaseException:
        found = self._referred(kind)
        args = self.read(arguments)
        error: BaseException = found.__new__(found, *args)
        error.args = args
        vars(error).update(self.read(attributes), said=str(said))
        return error


def _twin(name: str, parent: type[BaseException]) -> type[BaseException]:
    """Return an exception class that stands for a class of the other side."""
    if not issubclass(parent, BaseException):
        raise ValueError("an exception of no class of exceptions")
    return type(name, (parent,), {"__str__": lambda error: vars(error).get("said", ", ".join(map(str, error.args)))})


def _standard(value: Any) -> tuple[str, str] | None:
    """Return module and name of a function or class of the standard library."""
    if not isinstance(value, (types.BuiltinFunctionType, types.FunctionType, type)):
        return None
    module, name = getattr(value, "__module__", None), value.__name__
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names - {"__main__"}:
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


_MUTABLE = (list, dict, set, bytearray)


def _take_over(operands: tuple[Any, ...], changed: Any) -> None:
    """Apply the other side's changes to the arguments, in place."""
    for ours, theirs in zip(operands, changed):
        if theirs is None or type(ours) is not type(theirs):
            continue
        if isinstance(ours, (list, bytearray)):
            ours[:] = theirs
        elif isinstance(ours, (dict, set)):
            ours.clear()
            ours.update(theirs)


class Proxy:
    """Stand-in for an object of the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    _peer: Peer
    _number: int

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: D102
        return self._peer.ask("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("del", self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return self is other or self._peer.ask("eq", self, other) is True
        base = self._peer.ask("base", self)
        return not isinstance(base, Proxy) and bool(base == other)

    def __hash__(self) -> int:
        return hash(self._peer.ask("hash", self))

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self) is True

    def __len__(self) -> int:
        return operator.index(self._peer.ask("len", self))

    def __str__(self) -> str:
        return str(self._peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._peer.ask("repr", self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __iter__(self) -> Iterator[Any]:
        return _items(self._peer, self._peer.ask("iter", self))

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __contains__(self, item: Any) -> bool:
        return self._peer.ask("contains", self, item) is True

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self, key)

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: Any) -> bool:
        return self.__getattr__("__exit__")(None, None, None) is True

    def __instancecheck__(self, value: Any) -> bool:
        return self._peer.ask("isinstance", value, self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return self._peer.ask("issubclass", kind, self) is True


def _items(peer: Peer, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            item = peer.ask("next", iterator)
        except StopIteration:
            return
        yield item


def _operator(name: str) -> tuple[Callable[[Proxy, Any], Any], Callable[[Proxy, Any], Any]]:
    def only_object(value: Any, other: Any) -> Any:
        if not isinstance(other, Proxy) and not isinstance(value, Proxy):
            raise TypeError(f"{name} of an object of the program and a plain value gives no plain value")
        return value

    return (
        lambda ours, other: only_object(ours._peer.ask(name, ours, other), other),
        lambda ours, other: only_object(ours._peer.ask(name, other, ours), other),
    )


def _ordering(name: str) -> Callable[[Proxy, Any], Any]:
    return lambda ours, other: ours._peer.ask(name, ours, other) is True if isinstance(other, Proxy) else NotImplemented


for _name in _OPERATORS:
    _plain = _name.rstrip("_")
    _both = _operator(_name)
    setattr(Proxy, f"__{_plain}__", _both[0])
    setattr(Proxy, f"__r{_plain}__", _both[1])
for _name in _ORDERINGS:
    setattr(Proxy, f"__{_name}__", _ordering(_name))
