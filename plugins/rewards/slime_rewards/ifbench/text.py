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
_END = re.compile(r"(?<![.!?\u2026])[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?=\s|\Z)|[\u3002\uff01\uff1f]+")
_NEAR = 100
"""Characters before a full stop that tell whether it ends an abbreviation."""
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
    found, start, searched, has_words = list[str](), 0, 0, False
    last = len(text.rstrip())
    for match in _END.finditer(text):
        end, cut = match.end(), match.end() - _NEAR
        # Before what is cut off stands a character that is neither a line's start nor part of an abbreviation.
        near = f"_{text[cut:end]}" if cut > start else text[start:end]
        if end < last and _ABBREVIATION.search(near):
            continue
        has_words = has_words or _WORD.search(text, searched, end) is not None
        searched = end
        if has_words:
            found.append(text[start:end].strip())
            start, has_words = end, False
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
