"""Documents, read from the formats of corpora and servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """A document that is searched and shown."""

    title: str
    """May be empty."""
    text: str

    @property
    def searched(self) -> str:
        """Text to search: title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_document(row: Any) -> Document:
    """Read `{"contents": "title\\ntext"}`, or `{"text"[, "title"]}`. Raises ValueError for another form.

    If the first line of `contents` is in quotation marks, it is the title, as in Search-R1's corpora.
    """
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str):
            return Document(str(row.get("title") or "").strip('"'), row["text"])
        if isinstance(row.get("contents"), str):
            first, _, rest = row["contents"].partition("\n")
            if rest and first.startswith('"') and first.endswith('"'):
                return Document(first.strip('"'), rest)
            return Document("", row["contents"])
    raise ValueError(f"a document needs 'contents' or 'text', a string; got {row!r:.80}")
