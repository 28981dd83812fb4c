"""The options of a plugin as rows of a table."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel


class Option(NamedTuple):
    """An option as it is shown in tables."""

    name: str
    type: str
    default: str
    """Default value as text; empty if the option is required."""
    help: str


def option_rows(model: type[BaseModel]) -> list[Option]:
    """Return name, type, default and documentation of every option."""
    rows = []
    for name, field in model.model_fields.items():
        default = "" if field.is_required() else repr(field.get_default(call_default_factory=True, validated_data={}))
        shown = getattr(field.annotation, "__name__", None) if isinstance(field.annotation, type) else None
        kind = shown or str(field.annotation).replace("typing.", "")
        rows.append(Option(name, kind, default, " ".join((field.description or "").split())))
    return rows
