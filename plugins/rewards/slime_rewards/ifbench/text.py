"""Words, sentences, paragraphs and bullets of a text, by rules; what the checks count.

A word keeps inner apostrophes and hyphens ("don't", "well-known") but no other punctuation.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|inc|ltd|co|corp|gen|col|capt|lt|sgt|rev|hon|fig|eq|cf|approx|dept|est)"
    r"|\b(?:e\.g|i\.e|a\.m|p\.m|u\.s|u\.k|ph\.d)|(?-i:\b[A-HJ-Z])|(?m:^)[ \t]*\d+)\.\Z",
    re.IGNORECASE,
)
"""At the end of a piece of text: its full stop ends no sentence. Initials and numbers of a list are among them."""
_END = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?=\s|\Z)|[\u3002\uff01\uff1f]+")
_SEPARATOR = re.compile(r"\n\s*\n")
BULLET = re.compile(r"^[ \t]*(?:\*(?![*])|-(?!-)|\u2022)[ \t]*\S.*$", re.MULTILINE)


def words(text: str) -> list[str]:
    """Words in order, as written."""
    return _WORD.findall(text)


def count_word(word: str, text: str) -> int:
    """How often a word or phrase stands in the text by itself, not inside another word; case does not matter."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def sentences(text: str) -> list[str]:
    """Sentences in order: they end at `.`, `!` or `?` before a blank, though not after an abbreviation.

    The end of a line ends none, as for NLTK.
    """
    found, start = [], 0
    for match in _END.finditer(text):
        piece = text[start : match.end()]
        if _ABBREVIATION.search(piece) and text[match.end() :].strip():
            continue
        if words(piece):
            found.append(piece.strip())
            start = match.end()
    if words(text[start:]):
        found.append(text[start:].strip())
    return found


def paragraphs(text: str) -> list[str]:
    """Blocks between empty lines."""
    return [part.strip() for part in _SEPARATOR.split(text) if part.strip()]


def lines(text: str) -> list[str]:
    """Lines with something on them, with their indentation."""
    return [line for line in text.splitlines() if line.strip()]


def compare(count: int, relation: str, threshold: int) -> bool:
    """IFEval's relations. Raises ValueError for another word."""
    relation = relation.strip().lower()
    if relation == "at least":
        return count >= threshold
    if relation == "less than":
        return count < threshold
    if relation == "at most":
        return count <= threshold
    if relation in ("exactly", "equal to"):
        return count == threshold
    raise ValueError(f"relation {relation!r}: 'at least', 'less than', 'at most' or 'exactly'")
