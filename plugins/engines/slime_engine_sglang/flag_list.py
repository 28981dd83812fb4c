"""Every flag of an SGLang version: from a cache file, which `introspect` fills, or from the list slime ships.

Importing SGLang takes seconds, so the flags of the installed version are read once and cached in
`$XDG_CACHE_HOME/slime` (by default ~/.cache/slime), one file for each pair of versions. Without an SGLang environment
the shipped list is used, so that settings are checked on a machine that only prepares runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_engine_http.api.versions import tested

from slime_core.config.flag_parser import FlagParser, Switch, as_json
from slime_core.errors import ConfigError
from slime_core.files import replace_file
from slime_engine_sglang import introspect
from slime_engine_sglang.environment import CPU_STUBS, SERVER_DISTRIBUTION, find_python, installed_versions

logger = logging.getLogger(__name__)

SNAPSHOT = Path(__file__).resolve().parent / "flags_snapshot.json"
"""Shipped list, written by scripts/snapshot.py."""
SERVER, ROUTER = "sglang_", "router_"
"""Prefixes of the attributes on `args`; the rest of the name is the field of ServerArgs or RouterArgs."""
RENAMED: Mapping[str, str] = {
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "nsa-decode-backend": "dsa-decode-backend",
    "nsa-prefill-backend": "dsa-prefill-backend",
}
"""Flags of older SGLang versions, as used in launch scripts -> their new names; if a version has only the new name, the
old name is an alias for it."""
_DEADLINE_S = 300.0
_SIZES = {
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)},
}


def size(text: str) -> int:
    """Parse a number with an SI suffix (25.6k) or an IEC suffix (16Ki), as SGLang does."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    try:
        if match is None or (match[2].endswith("i") and "." in match[1]):
            return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 32768 or 32k") from None
    return int(Decimal(match[1]) * _SIZES[match[2]])


TYPES: Mapping[str, Callable[[str], Any] | None] = {
    "str": None,
    "int": int,
    "float": float,
    "human_readable_int": size,
    "loads": as_json,
    "json_list_type": as_json,
    "parse_cuda_graph_config_arg": as_json,
}
"""Type function of SGLang's parser -> slime's type function; other types take text."""


@dataclass(frozen=True)
class EngineFlags:
    """The flags of an SGLang environment."""

    server: FlagParser
    router: FlagParser
    versions: Mapping[str, str]

    def field(self, owner: str, name: str) -> argparse.Action | None:
        """Return the flag of a field of ServerArgs (owner `SERVER`) or RouterArgs (`ROUTER`), or None."""
        return self._by_attribute.get(owner + name)

    @cached_property
    def _by_attribute(self) -> dict[str, argparse.Action]:
        return {flag.dest: flag for flag in (*self.server.flags, *self.router.flags)}


def flags_for(settings: Any) -> EngineFlags:
    """Return the flags of the environment that a run's settings name; `settings` is an object, or a partial mapping.

    Raises:
        ConfigError: --engine-python names no such environment, or its SGLang cannot be imported.
    """
    if isinstance(settings, Mapping):
        settings = SimpleNamespace(engine_python=settings.get("engine_python"))
    python = find_python(settings)
    return shipped_flags() if python is None else installed_flags(python)


@cache
def installed_flags(python: Path) -> EngineFlags:
    """Return the flags of an interpreter's SGLang. Raises ConfigError if SGLang cannot be imported."""
    versions = installed_versions(python)
    file = cache_file(versions)
    found = _read(file, versions)
    if found is None:
        from filelock import FileLock

        with ExitStack() as stack:
            # The first rank of a machine makes the list and the others wait. If the directory cannot be written to, or
            # the lock is held too long, the list is only made more than once.
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(file.with_suffix(".lock"), timeout=_DEADLINE_S))
            found = _read(file, versions) or _make(python, file)
    if not found["router"]:
        found = found | {"router": _shipped()["router"]}
    return _engine_flags(found, "")


@cache
def shipped_flags() -> EngineFlags:
    """Return the flags of the SGLang version that slime was tested with."""
    return _engine_flags(_shipped(), " (slime's own list, as no SGLang is installed here or named by --engine-python)")


def cache_file(versions: Mapping[str, str]) -> Path:
    """Return the cache file of these versions."""
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "slime"
    words = [versions.get("sglang", "none"), versions.get("sglang-router", "none")]
    return directory / f"sglang-flags-{'-'.join(words)}-{introspect.SCHEMA}.json"


def introspected(python: Path) -> dict[str, Any]:
    """Run `introspect` in the interpreter's environment; return its output and the versions.

    Raises:
        ConfigError: `introspect` failed; the message has the last line of its error output.
    """
    versions = installed_versions(python)
    command = [str(python), introspect.__file__, *map(str, sorted(CPU_STUBS.iterdir()))]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=environment)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"importing SGLang took longer than {_DEADLINE_S:.0f} s: {' '.join(command)}") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(
            f"SGLang {versions[SERVER_DISTRIBUTION]} of {python} cannot be asked for its flags: {why}; {tested()}."
            f" Type: {' '.join(command)}"
        )
    return {**json.loads(lines[-1]), "versions": versions}


def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return found


def _read(file: Path, versions: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a cache file's content, or None if it is missing or unusable."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        _engine_flags(found, "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    usable = found.get("schema") == introspect.SCHEMA and found.get("versions") == dict(versions)
    return found if usable and found["server"] else None


def _make(python: Path, file: Path) -> dict[str, Any]:
    found = introspected(python)
    try:
        replace_file(file, json.dumps(found, separators=(",", ":")).encode())
    except OSError as error:
        logger.warning("the list of SGLang's flags cannot be kept in %s, so every start makes it: %s", file, error)
    return found


def _engine_flags(found: Mapping[str, Any], note: str) -> EngineFlags:
    versions = found["versions"]
    version = f"sglang-router {versions['sglang-router']}" if "sglang-router" in versions else "sglang-router"
    server = FlagParser(f"SGLang {versions['sglang']}{note}", allow_abbrev=True)
    router = FlagParser(f"{version}{note}")
    names = {name for row in found["server"] for name in row["names"]}
    older = {new: [old] for old, new in RENAMED.items() if old not in names}
    # If two flags set the same field (as in 0.5.23), the later flag is an old spelling, of another type.
    rows = {row["dest"]: row for row in reversed(found["server"])}
    for row in reversed(rows.values()):
        _add_flag(server, SERVER, row, older.get(row["names"][0], ()))
    for row in found["router"]:
        _add_flag(router, ROUTER, row)
    return EngineFlags(server, router, versions)


def _add_flag(parser: FlagParser, owner: str, row: Mapping[str, Any], older: Sequence[str] = ()) -> None:
    """Add a flag from a row of `introspect`; the help of a flag that slime sets names the reason."""
    from slime_engine_sglang.owned import ROUTER_OWNED, SERVER_OWNED

    prefix, dest, names = owner.replace("_", "-"), row["dest"], [*row["names"], *older]
    owned = (SERVER_OWNED if owner == SERVER else ROUTER_OWNED).get(dest)
    told = f"Slime's to set, whatever the default: {owned}." if owned else row.get("help", "").replace("%", "%%")
    shape = {key: row[key] for key in ("nargs", "const", "choices") if key in row} | {"type": TYPES.get(row["type"])}
    if row["type"] in ("switch", "toggle"):
        off = [name for word in names for name in (f"--{prefix}no-{word}", f"--no-{prefix}{word}")]
        shape = {"action": Switch, "off": off if row["type"] == "toggle" else ()}
    flags = (f"--{prefix}{name}" for name in names)
    parser.add_argument(*flags, dest=owner + dest, default=row.get("default"), help=told, **shape)
