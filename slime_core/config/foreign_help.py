"""The flags of another program as text: what `slime train --help-sglang` prints."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.passthrough import FlagList, ForeignFlag, ForeignFlags


def flags_text(owners: Sequence[ForeignFlags], settings: Mapping[str, Any]) -> str:
    """Every flag of these owners; `settings` is what was given of slime's own. Raises ConfigError."""
    width = min(shutil.get_terminal_size().columns, 120)
    blocks = []
    for owner in owners:
        listed = owner.listing(settings) if owner.listing is not None else FlagList(owner.flags, owner.owner)
        users = ", ".join(owner.used_by) or "none in this version"
        blocks.append(f"{owner.owner} ({listed.version}; taken by: {users})\n")
        blocks += [_entry(flag, width) for flag in listed.flags]
        blocks.append("")
    return "\n".join(blocks).rstrip()


def _entry(flag: ForeignFlag, width: int) -> str:
    value = _value(flag)
    head = "  " + ", ".join(f"--{name}" for name in (*flag.names, *flag.off[:1])) + (f" {value}" if value else "")
    text = " ".join(flag.help.split())
    if flag.default not in (None, False, [], {}) and "default" not in text.lower():
        text += f" (default: {flag.default if isinstance(flag.default, str) else json.dumps(flag.default)})"
    body = textwrap.fill(text.strip(), width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return f"{head}\n{body}" if text.strip() else head


def _value(flag: ForeignFlag) -> str:
    if flag.kind in ("switch", "toggle"):
        return ""
    words = {"int": "N", "size": "N", "float": "X", "json": "JSON"}
    value = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else words.get(flag.kind, "TEXT")
    if flag.is_list:
        value = " ".join([value] * flag.count) if flag.count else f"{value} ..."
    return f"[{value}]" if flag.may_be_empty else value
