"""The SGLang versions that slime is tested with, and what is said about others.

A version string comes from `/server_info`, or from the environment that slime launches servers of. Another version is
not refused. Where it answers otherwise, whoever reads the answer says so (`transport.expecting`).
"""

from __future__ import annotations

import re

TESTED_VERSIONS = ("0.5.20", "0.5.23")
"""Oldest first; `make sglang` installs the last one."""

FIRST_ROUTER = (0, 3, 0)
"""Of sglang-router; tested with 0.3.2. Those before have another API."""


def version_number(software: str) -> tuple[int, int, int] | None:
    """(major, minor, patch); None for servers that are not SGLang's, whose version is no number."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", software)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def tested() -> str:
    """The list, for messages."""
    return f"slime is tested with SGLang {' and '.join(TESTED_VERSIONS)}"


def untested(software: str, pip: str = "pip") -> str:
    """What to warn of for a version that slime is not tested with; empty for one that it is, and for other servers.

    `pip` is the command that installs where that version is.
    """
    if version_number(software) is None or software.removeprefix("v").partition("+")[0] in TESTED_VERSIONS:
        return ""
    return f"{tested()}, not with {software}. To have one of them, type: {pip} install sglang=={TESTED_VERSIONS[-1]}"
