"""The user's note on a run, `note.txt` in its directory: `slime runs --note` and the page of `slime view` write it."""

from __future__ import annotations

from pathlib import Path

from slime_core.checkpoint.run_dir import write_text
from slime_core.errors import ConfigError
from slime_runs.files import read_text

FILE = "note.txt"
LONGEST = 10_000
"""Characters of a note."""


def read_note(run: Path) -> str:
    """Return the note of a run directory; empty without one."""
    return read_text(run / FILE).strip()[:LONGEST]


def write_note(run: Path, text: str) -> None:
    """Replace the note; an empty text removes it. Raises ConfigError if it is too long, RecordError if it fails."""
    text = text.strip()
    if len(text) > LONGEST:
        raise ConfigError(f"the note has {len(text):,} characters; at most {LONGEST:,} are allowed")
    write_text(run / FILE, text + "\n" * bool(text))
