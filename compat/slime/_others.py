"""Warn if there is another package called `slime`, usually THUDM/slime's own: one of the two hides the other.

`slime/__init__.py` calls `warn` once. There are two cases: a folder elsewhere on the path, which this package hides (or
which hides this package in a process with another path), and a distribution `slime` in the same folder, whose files pip
has mixed with the files of this package.
"""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent


class ShadowWarning(UserWarning):
    """Two packages claim the import name `slime`."""


def folders(path: Iterable[str] | None = None) -> list[Path]:
    """Return other packages called `slime` on the path, including the working directory."""
    entries = [*(sys.path if path is None else path), ""]
    found: list[Path] = []
    for entry in entries:
        folder = Path(entry or ".").absolute() / "slime"
        is_package = (folder / "__init__.py").is_file() or (folder / "utils" / "arguments.py").is_file()
        if is_package and folder.resolve() != HERE and folder.resolve() not in found:
            found.append(folder.resolve())
    return found


def distribution() -> str | None:
    """Return THUDM/slime's distribution as "slime <version>"; its files may be in the same folder as this package."""
    try:
        return f"slime {importlib.metadata.version('slime')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def message() -> str | None:
    """Return the warning text; None if there is no other `slime`."""
    claims = [f"the package {folder}" for folder in folders()]
    if found := distribution():
        claims.append(f"the distribution {found}")
    if not claims:
        return None
    return (
        f"`slime` is slime-compat's ({HERE}), and there is also {', '.join(claims)}; only one of them is imported."
        " For THUDM/slime itself: pip uninstall slime-compat. To run its users' code on slime-rl: pip uninstall slime,"
        " and start outside its checkout"
    )


def warn() -> None:
    """Warn if there is another `slime`; called once per process."""
    text = message()
    if text is not None:
        warnings.warn(text, ShadowWarning, stacklevel=4)
