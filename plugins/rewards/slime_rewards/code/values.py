"""Encode plain values as JSON and decode them, for exchange between a program's process and its tests' process.

Both processes run this file's text, so it imports only the standard library. None, bool, str, float and small int are
encoded unchanged; every other value is a list that begins with its kind. Decoding never runs code of the sender.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Other = Callable[[Any], Any]

_KINDS: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice, object, type,
    type(None), datetime.date, datetime.datetime, datetime.time, datetime.timedelta, Decimal, Fraction,
)  # fmt: skip
_TYPES = {kind.__name__: kind for kind in _KINDS}
_SINGLE = {"...": Ellipsis, "NotImplemented": NotImplemented}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict, "default": lambda items: defaultdict(None, items), "counter": lambda items: Counter(dict(items)),
    "ordered": OrderedDict,
}  # fmt: skip
_FORMS: dict[type, str] = {
    list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", dict: "dict", defaultdict: "default",
    Counter: "counter", OrderedDict: "ordered",
}  # fmt: skip


def encode(value: Any, other: Other) -> Any:
    """Return the JSON form of a value; `other` encodes values that are not plain."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -(1 << 62) < value < 1 << 62):
        return value
    name = _FORMS.get(kind)
    if name in _SEQUENCES:
        return [name, *[encode(item, other) for item in value]]
    if name in _MAPPINGS:
        return [name, *[[encode(key, other), encode(item, other)] for key, item in value.items()]]
    form = _scalar(kind, value, other)
    return other(value) if form is None else form


def _scalar(kind: type, value: Any, other: Other) -> list[Any] | None:
    """Return the encoded form of a plain value that is no sequence or mapping; None for other values."""
    if kind is int:
        return ["int", hex(value)]  # decimal digits are limited
    if kind in (bytes, bytearray):
        return [kind.__name__, value.decode("latin-1")]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (range, slice):
        return [kind.__name__, *[encode(part, other) for part in (value.start, value.stop, value.step)]]
    if kind is deque:
        return ["deque", value.maxlen, *[encode(item, other) for item in value]]
    if kind in (Decimal, Fraction):
        return [kind.__name__, str(value)]
    if kind is datetime.timedelta:
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if kind in (datetime.date, datetime.datetime, datetime.time) and getattr(value, "tzinfo", None) is None:
        return [kind.__name__, value.isoformat()]
    if isinstance(value, type) and _TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    names = [name for name, single in _SINGLE.items() if value is single]
    return ["single", *names] if names else None


def decode(form: Any, other: Other) -> Any:
    """Decode a JSON form; `other` decodes the forms of `encode`'s `other`. Raises ValueError for an invalid form."""
    if not isinstance(form, list):
        if form is None or isinstance(form, (bool, int, float, str)):
            return form
        raise ValueError("the form of no value")
    kind, *rest = form
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, other) for item in rest)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(decode(key, other), decode(item, other)) for key, item in rest])
    if kind in _READ:
        return _READ[kind](*rest)
    if kind in ("range", "slice"):
        return {"range": range, "slice": slice}[kind](*[decode(part, other) for part in rest])
    if kind == "deque":
        return deque([decode(item, other) for item in rest[1:]], rest[0])
    return other(form)


_READ: dict[str, Callable[..., Any]] = {
    "int": lambda digits: int(digits, 16),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
    "complex": complex,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "timedelta": datetime.timedelta,
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
    "type": _TYPES.__getitem__,
    "single": _SINGLE.__getitem__,
}


_MOST_DIGITS = 100_000


def _integer(digits: str) -> int:
    """Return the integer; Python's own limit is 4300 digits."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of more than {_MOST_DIGITS} digits")
    return int(Decimal(digits))


def read_json(text: str | bytes) -> Any:
    """Return the JSON value. Raise ValueError if the text is not JSON."""
    return json.loads(text, parse_int=_integer)


def base_value(value: Any) -> Any:
    """Convert an object of a subclass of a plain type to that type (numpy arrays to lists); return others unchanged."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    for base, plain in _BASES.items():
        if isinstance(value, base) and type(value) is not base:
            return plain(value)
    return value


_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: lambda number: complex.__add__(number, 0j),
    str: lambda text: "".join(str.__iter__(text)),
    bytes: lambda data: bytes(bytes.__iter__(data)),
    list: lambda items: list(list.__iter__(items)),
    tuple: lambda items: tuple(tuple.__iter__(items)),
    set: lambda items: set(set.__iter__(items)),
    frozenset: lambda items: frozenset(frozenset.__iter__(items)),
    dict: lambda items: {key: dict.__getitem__(items, key) for key in dict.__iter__(items)},
}
