"""The SGLang versions that slime is tested with, and the warning for others.

A version string comes from `/server_info`, or from the environment in which slime launches servers. Other versions are
not refused. If a response has an unexpected form, the code that reads it raises an error (`transport.expecting`).
"""

from __future__ import annotations

import re

TESTED_VERSIONS = ("0.5.20", "0.5.23")
"""Tested versions, oldest first; `make sglang` installs the last."""

FIRST_ROUTER = (0, 3, 0)
"""First supported version of sglang-router; tested with 0.3.2. Earlier versions have another API."""


def version_number(software: str) -> tuple[int, int, int] | None:
    """Return (major, minor, patch); None for a server other than SGLang, whose version is not a number."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", software)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def tested() -> str:
    """Return the list of tested versions, for messages."""
    return f"slime is tested with SGLang {' and '.join(TESTED_VERSIONS)}"


def untested(software: str, pip: str = "pip") -> str:
    """Return a warning if slime is not tested with the version; empty for tested versions and for other servers.

    `pip` is the command that installs into the environment of that version.
    """
    if version_number(software) is None or software.removeprefix("v").partition("+")[0] in TESTED_VERSIONS:
        return ""
    return f"{tested()}, not with {software}. To have one of them, type: {pip} install sglang=={TESTED_VERSIONS[-1]}"
