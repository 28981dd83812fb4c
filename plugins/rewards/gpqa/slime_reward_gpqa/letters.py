r"""A response to a multiple-choice question -> the letter it settles on, read from phrases and from letters alone."""

from __future__ import annotations

import re
import string

VALID_LETTERS = string.ascii_uppercase[:10]
"""A to J, unless `metadata["valid_letters"]` or the number of choices says otherwise."""

_OPENING = r"[(\[{*\s\"'$]*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*"
_ENDS = r"(?![A-Za-z'\u2019]|\.[a-z])"
_LETTER = rf"{_OPENING}([A-Za-z]){_ENDS}"
_PHRASES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i:\b(?:answer|option|choice)\s*(?:is|:|=)\s*(?:the\s+)?(?:(?:option|choice|letter)\s*)?:?)" + _LETTER,
        r"(?<![A-Za-z])([A-Z]|(?<=\()[a-z](?=\)))[)\].*:\"']*\s+(?i:is\s+(?:the\s+)?(?:correct|right|best)\b)",
        r"(?i:\bfinal\s+answer\b[^A-Za-z\n]{0,10})" + _LETTER,
        r"\\boxed\s*\{" + _LETTER,
        r"(?i:\b(?:choose|select|pick)\s+(?:(?:option|choice|answer)\s+)?)" + _LETTER,
    )
)
_LISTED = re.compile(r"^[ \t]*\(?([A-Z])[).:]", re.MULTILINE)
_ALONE = re.compile(rf"(?<![A-Za-z'\"\u2019\u201c])([A-Z]|(?<=\()[a-z](?=\))){_ENDS}")
_ONLY = re.compile(r"[\W_]*([a-z])[\W_]*")
_WORD = re.compile(r"\s+(?!(?:is|because|since|as|or|and)\b)[a-z]")
_DENIED_BEFORE = re.compile(
    r"(?:\bnot|n['\u2019]t|\bnever|\bneither|\bnor|\brather than|\binstead of|\bexcept|\banything but|\bruled? out"
    r"|\b(?:eliminat|exclud|reject|discard)\w*)\s+(?:(?:be|choose|select|pick)\s+)?(?:the\s+)?(?:(?:option|choice|answer|letter)s?\s*)?"
    r"[(\[{*\s\"'$]*\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[)\]}*\"'$]*\s*(?:(?:is|was|are|seems?|must be|would be)\s+(?:\w+ly\s+)?(?:not|wrong|incorrect|false|ruled out"
    r"|eliminated|impossible)\b|(?:is|was|does|ca|wo)n['\u2019]t\b|can\s?not\b|does not\b)",
    re.IGNORECASE,
)
_SEVERAL_AFTER = re.compile(
    r"[)\]}*\"'$.]*[ \t]*(?:,|/|&|\bor\b|\band\b)?[ \t]*(?:(?:or|and)[ \t]+)?[(\[{*\"'$]*([A-Z])" + _ENDS
)
_SEVERAL_BEFORE = re.compile(
    r"(?<![A-Za-z])[A-Z][)\]}*\"'$.]*\s*(?:,|/|&|\bor\b|\band\b)\s*(?:(?:or|and)\s+)?[(\[{*\"'$]*\Z"
)
_RETRACTED = re.compile(
    r"\b(?:that|this|it|which)(?:['\u2019]s| is| was) (?:wrong|incorrect|false|not (?:right|correct))\b"
    r"|\bscratch that\b|\bI (?:was wrong|retract|take (?:it|that) back)\b",
    re.IGNORECASE,
)


def chosen_letter(response: str, letters: str = VALID_LETTERS) -> str | None:
    """The letter that the response settles on; None when it names none, or several, or takes it back."""
    named = [m for phrase in _PHRASES for m in phrase.finditer(response) if _counts(m, response, letters)]
    if named:
        last = max(named, key=lambda match: match.start(1))
        several = _SEVERAL_AFTER.match(response, last.end(1))
        if several and several[1] in letters and not _is_denied(several, response) and not _is_word(several, response):
            return None
        return None if _RETRACTED.search(response, last.end(1)) else last[1].upper()
    if only := _ONLY.fullmatch(response):
        return only[1].upper() if only[1].upper() in letters else None
    listed = {match.start(1) for match in _LISTED.finditer(response)}
    listed = listed if len(listed) > 1 else set()
    alone = [m for m in _ALONE.finditer(response) if _counts(m, response, letters) and m.start(1) not in listed]
    if not alone or _SEVERAL_BEFORE.search(response, 0, alone[-1].start(1)):
        return None
    return None if _RETRACTED.search(response, alone[-1].end(1)) else alone[-1][1].upper()


def _counts(match: re.Match[str], response: str, letters: str) -> bool:
    return match[1].upper() in letters and not _is_word(match, response) and not _is_denied(match, response)


def _is_denied(match: re.Match[str], text: str) -> bool:
    before = (_DENIED_BEFORE.search(text, max(0, place - 60), place) for place in {match.start(), match.start(1)})
    return any(before) or bool(_DENIED_AFTER.match(text, match.end(1)))


def _is_word(match: re.Match[str], text: str) -> bool:
    """The article or the pronoun: `A dog`, `I think`."""
    return match[1] in "AIai" and bool(_WORD.match(text, match.end(1)))
