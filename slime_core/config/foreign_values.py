"""Words of a command line, a YAML value or the text of a variable -> the value of another program's flag.

The rules are argparse's, so that what is accepted here is accepted there: the number of values, their type, then the
choices. Whole numbers and truth values in YAML must be such; text is read as on a command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from slime_core.config.passthrough import ForeignFlag
from slime_core.config.spec import did_you_mean
from slime_core.config.yaml_file import read_scalar

_SIZES = {
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)},
}


def convert_words(flag: ForeignFlag, words: Sequence[str]) -> Any:
    """What follows a flag on the command line, as its value. Raises ValueError saying what is expected."""
    if flag.kind in ("switch", "toggle"):
        if words:
            raise ValueError("takes no value")
        return True
    if flag.is_list:
        return convert(flag, list(words))
    if len(words) > 1:
        if flag.kind == "any":
            return [convert(flag, word) for word in words]
        raise ValueError(f"expected one value, not {len(words)}")
    if not words:
        if flag.kind == "any":
            return True
        if flag.may_be_empty:
            return flag.const
        raise ValueError("expected a value")
    return convert(flag, words[0])


def convert(flag: ForeignFlag, raw: Any) -> Any:
    """A string or YAML value as the flag's type; None stays None. Raises ValueError saying what is expected."""
    if raw is None:
        return None
    if flag.is_list:
        values = [_one(flag, value) for value in _elements(raw)]
        if flag.count is not None and len(values) != flag.count:
            raise ValueError(f"expected {flag.count} values")
        if not values and not flag.may_be_empty:
            raise ValueError("expected at least one value")
        return values
    if raw is True and flag.may_be_empty and flag.kind != "switch":
        return flag.const
    return _one(flag, raw)


def _elements(raw: Any) -> list[Any]:
    if isinstance(raw, list):
        return raw
    if not isinstance(raw, str):
        return [raw]
    if raw.lstrip().startswith("["):
        values = _json(raw)
        assert isinstance(values, list)
        return values
    return raw.split()


def _one(flag: ForeignFlag, raw: Any) -> Any:
    value = _typed(flag.kind, raw)
    if flag.choices and value not in flag.choices:
        hint = did_you_mean(str(value), map(str, flag.choices), cutoff=0.6)
        raise ValueError(f"must be one of {', '.join(map(str, flag.choices))}" + (f".{hint}" if hint else ""))
    return value


def _typed(kind: str, raw: Any) -> Any:
    if kind in ("switch", "toggle"):
        return _truth(raw)
    if kind == "any":
        return _guess(raw) if isinstance(raw, str) else raw
    if kind == "json":
        return _json(raw) if isinstance(raw, str) else raw
    if kind == "str":
        return _text(raw)
    if isinstance(raw, bool):
        raise ValueError("expected a number")
    return _number(kind, raw)


def _truth(raw: Any) -> bool:
    try:
        value = read_scalar(raw) if isinstance(raw, str) else raw
    except ValueError:
        value = None
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _text(raw: Any) -> str:
    """A mapping becomes JSON, since options that are text may hold it."""
    if isinstance(raw, dict):
        return json.dumps(raw)
    if isinstance(raw, bool | list):
        raise ValueError("expected text")
    return str(raw)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def _guess(text: str) -> Any:
    """A number or truth value when it reads as one, else the text itself (JSON stays text)."""
    try:
        value = read_scalar(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _number(kind: str, raw: Any) -> int | float:
    what = "a number" if kind == "float" else "a whole number"
    try:
        if kind == "float":
            return float(raw)
        if kind == "size" and isinstance(raw, str):
            return _size(raw)
        if isinstance(raw, float) and not raw.is_integer():
            raise ValueError
        return int(raw)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"expected {what}{', such as 32768 or 32k' if kind == 'size' else ''}") from None


def _size(text: str) -> int:
    """SI suffixes (25.6k) and IEC suffixes (16Ki), as SGLang reads them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if match is None:
        return int(text)
    if match[2].endswith("i") and "." in match[1]:
        raise ValueError
    return int(Decimal(match[1]) * _SIZES[match[2]])
