"""Search in slime's documentation: the sections of its pages, and every flag with its help.

The pages are those of `docs/` (`pages` beside this file leads there; a wheel contains them).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGES = Path(__file__).with_name("pages")
_HEADING = re.compile(r"^#{1,4} (.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MOST = 20


class Section(NamedTuple):
    """A section of a page, or a flag."""

    page: str
    heading: str
    text: str


def search(query: str, count: int = 5) -> list[Section]:
    """Return the sections with most of the words, best first (BM25; words in a heading count five times)."""
    words = re.findall(r"\w+", query)
    if not words:
        return []
    wanted = " OR ".join(f'"{word}"' for word in words)
    rows = _table().execute(
        "SELECT page, heading, text FROM sections WHERE sections MATCH ? ORDER BY bm25(sections, 1, 5, 1) LIMIT ?",
        (wanted, max(1, min(count, _MOST))),
    )
    return [Section(*row) for row in rows]


@cache
def _table() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE VIRTUAL TABLE sections USING fts5(page, heading, text, tokenize='porter unicode61')")
    connection.executemany("INSERT INTO sections VALUES (?, ?, ?)", [*_of_pages(), *_of_flags()])
    return connection


def _of_pages() -> Iterator[Section]:
    for file in sorted(PAGES.rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        # A comment in a block of code is no heading.
        blank = _CODE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
        found = list(_HEADING.finditer(blank))
        ends = [heading.start() for heading in found[1:]] + [len(text)]
        for heading, end in zip(found, ends):
            if body := text[heading.end() : end].strip():
                yield Section(file.relative_to(PAGES).as_posix(), heading[1], body)


def _of_flags() -> Iterator[Section]:
    from slime_core.config.spec import flag_specs

    for spec in flag_specs().values():
        yield Section("flags", spec.flag, spec.help)
