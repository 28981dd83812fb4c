"""The fields of megatron-core's configuration classes: the list that slime ships; nothing of Megatron is imported.

Called by `flags.py` when a flag is looked up, and by `config.py`, which must know where a flag's value goes. The list
is that of the release series which `installed.py` asks for; settings are checked by it also on a machine without
megatron-core that only prepares runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

SNAPSHOT = Path(__file__).resolve().parent / "fields_snapshot.json"
"""Written by scripts/snapshot_megatron_flags.py."""

Scalar = Literal["bool", "int", "float", "str"]
Shape = Literal["one", "list", "either"]
"""either: one value or a list of them."""


@dataclass(frozen=True)
class ConfigField:
    """One field that can be a flag."""

    name: str
    owners: tuple[str, ...]
    """Which configurations have it: "transformer", "mla" (multi-latent attention's alone), "optimizer", "ddp"."""
    kind: Scalar
    shape: Shape = "one"
    choices: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    """Flags (without dashes) that Megatron has for it instead of the field's own name."""
    default: Any = None
    help: str = ""


@dataclass(frozen=True)
class FieldList:
    """The fields of one megatron-core."""

    fields: Mapping[str, ConfigField]
    version: str
    """For messages, such as "megatron-core 0.16.1"."""


@cache
def known_fields() -> FieldList:
    """Those of the megatron-core that slime was tested with."""
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    fields = [_from_json(row) for row in stored["fields"]]
    return FieldList({field.name: field for field in fields}, f"megatron-core {stored['version']}")


def _from_json(row: Mapping[str, Any]) -> ConfigField:
    values: dict[str, Any] = {k: tuple(v) if k in ("owners", "choices", "names") else v for k, v in row.items()}
    return ConfigField(**values)
