"""A document, from the forms in which corpora and servers write one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """What is searched, and shown."""

    title: str
    """May be empty."""
    text: str

    @property
    def searched(self) -> str:
        """Both."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def read_document(row: Any) -> Document:
    """`{"contents": "title\\ntext"}`, or `{"text"[, "title"]}`. Raises ValueError: neither.

    The first line of `contents` in quotation marks is the title, as in Search-R1's corpora.
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
