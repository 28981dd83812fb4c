"""The fields of megatron-core's configuration classes, from a list that slime ships, without importing Megatron.

Called by `flags.py` to look up a flag, and by `config.py` to find the configuration that takes the flag's value. The
list belongs to the release series that `installed.py` requires. Settings are also checked against it on a machine
without megatron-core that only prepares runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

SNAPSHOT = Path(__file__).resolve().parent / "fields_snapshot.json"
"""File with the list, written by scripts/snapshot.py."""

Scalar = Literal["bool", "int", "float", "str"]
Shape = Literal["one", "list", "either"]
"""Shape of a field's value; "either" means one value or a list of values."""


@dataclass(frozen=True)
class ConfigField:
    """A Megatron field that can be a flag."""

    name: str
    owners: tuple[str, ...]
    """Configurations with the field: "transformer", "mla" (only multi-latent attention's), "optimizer", "ddp"."""
    kind: Scalar
    shape: Shape = "one"
    choices: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    """Megatron's flags (without dashes) for the field, if they differ from the field's name."""
    default: Any = None
    help: str = ""


@dataclass(frozen=True)
class FieldList:
    """The fields of one megatron-core version."""

    fields: Mapping[str, ConfigField]
    version: str
    """Version for messages, such as "megatron-core 0.16.1"."""


@cache
def known_fields() -> FieldList:
    """Return the fields of the megatron-core version that slime was tested with."""
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    fields = [_from_json(row) for row in stored["fields"]]
    return FieldList({field.name: field for field in fields}, f"megatron-core {stored['version']}")


def _from_json(row: Mapping[str, Any]) -> ConfigField:
    values: dict[str, Any] = {k: tuple(v) if k in ("owners", "choices", "names") else v for k, v in row.items()}
    return ConfigField(**values)
