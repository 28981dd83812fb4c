"""Write the files that a script generates, or with `--check` say which of them are out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def settle(wanted: Mapping[Path, str], script: str, *, check: bool, stray: Iterable[Path] = ()) -> int:
    """Write each file whose text differs, and remove stray ones; return 1 if `check` finds such a file.

    Args:
        wanted: File -> its text.
        script: Path of the script, for the message of `check`.
        check: Change nothing.
        stray: Files of an earlier run that are no longer wanted.
    """
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in sorted([*stale, *stray]):
            print(f"{path} is out of date; run python scripts/{Path(script).name}", file=sys.stderr)
        return int(bool([*stale, *stray]))
    for path in stray:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0
