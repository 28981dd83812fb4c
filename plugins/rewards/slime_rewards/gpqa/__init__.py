r"""1.0 when the chosen letter is the correct one, else 0.0: multiple choice, as for GPQA (Rein et al., 2023).

The response is read after its last `</think>`. The chosen letter is the last that a phrase such as `the answer is (b)`,
`B is correct` or `\boxed{B}` names, else the last capital (or bracketed) letter that stands alone, else the letter that
is all of the response. A letter that is denied (`not B`, `B is wrong`), retracted, or one of several (`B or C`) is not
chosen. The correct one comes from `metadata["correct_letter"]`, a label of one letter, a label that is a number (index
of the choice, from 0), or a label that is the text of one of `metadata["choices"]`. With no letter on one side, the
correct choice's text in the response counts, where nothing denies it and no other choice's text is there.

The words "I" and "A" are no choices when a lower-case word follows.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares

_DENIAL = re.compile(
    r"\b(?:not|or|anything but|never|neither|nor|wrong|incorrect|false|nicht|keine?|keinesfalls|niemals|falsch"
    r"|alles au(?:\u00df|ss)er|pas|jamais|tout sauf|faux|no es|nunca es|todo menos|incorrecto|falso)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
"""In English, German, French and Spanish."""
_NO_TEXT = re.compile(r"""\s*(?:\S?\s*\Z|[\[{]\s*["'])""")
"""A label that is one character, or the JSON text of a list or an object."""
_SENTENCE = re.compile(r"(?<=[.!?;\n])\s+|\n")
_NOT_ALPHANUMERIC = re.compile(r"(?:(?!(?<![\w.])-(?=[\d.])|(?<=\d)[./](?=\d))[\W_])+")
"""But the sign of a number, and what stands between its digits."""


def extract_answer(sample: Sample) -> str | None:
    """The chosen letter, for votes."""
    letters = _valid_letters(sample.metadata, _choices(sample.metadata.get("choices")))
    return chosen_letter(sample.response.rpartition("</think>")[2], letters)


@declares(RewardTraits(extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    """Return 1.0 or 0.0.

    Raises:
        ValueError: Neither label nor metadata names the correct choice.
    """
    metadata, response = sample.metadata, sample.response.rpartition("</think>")[2]
    choices = _choices(metadata.get("choices"))
    letters = _valid_letters(metadata, choices)
    label = sample.label[0] if isinstance(sample.label, (list, tuple)) and len(sample.label) == 1 else sample.label
    correct, chosen = correct_letter(label, metadata, choices, letters), chosen_letter(response, letters)
    if correct and chosen:
        return float(correct == chosen)
    texts = [choices.get(correct or ""), metadata.get("correct_answer"), metadata.get("answer_text")]
    texts += [label] if isinstance(label, str) and not correct and not _NO_TEXT.match(label) else []
    right = [_plain(text) for text in texts if text is not None and _plain(text)]
    if not correct and not right:
        said = "no label (--label-key NAME names its column)" if sample.label is None else f"label {sample.label!r:.80}"
        raise ValueError(
            f"{said}: expected the correct choice's letter (one of {letters}), its number from 0, or its text;"
            " metadata['correct_letter'] or metadata['correct_answer'] may hold it instead"
        )
    return float(_says_one_of(right, [_plain(text) for text in choices.values()], response))


def _says_one_of(right: Sequence[str], choices: Sequence[str], response: str) -> bool:
    """Whether the last sentence says one of the texts as the answer, and nothing says another choice's."""
    others = [text for text in choices if text and not any(text in r or r in text for r in right)]
    last = next((part for part in reversed(_SENTENCE.split(response)) if _plain(part)), "")
    if (
        _DENIAL.search(last)
        or last.rstrip().endswith("?")
        or any(f" {text} " in f" {_plain(response)} " for text in others)
    ):
        return False
    end = f" {_plain(last.rpartition(',')[2])} "  # of several with commas between them only the last can be meant
    return any(f" {text} " in end for text in right)


def correct_letter(label: Any, metadata: Mapping[str, Any], choices: Mapping[str, str], letters: str) -> str | None:
    """The letter of the correct choice; None when nothing tells it."""
    told = metadata.get("correct_letter")
    for candidate in (told, label):
        text = str(candidate).strip().strip("().").upper() if isinstance(candidate, str) else ""
        if len(text) == 1 and text in letters:
            return text
    if isinstance(label, (int, float)) and not isinstance(label, bool):
        return letters[int(label)] if label == label and 0 <= label < len(letters) and label == int(label) else None
    if isinstance(label, str):
        same = [letter for letter, text in choices.items() if _plain(text) and _plain(text) == _plain(label)]
        if same:
            return same[0]
        digits = label.strip()
        if digits.isascii() and digits.isdigit() and len(digits) < 3 and int(digits) < len(letters):
            return letters[int(digits)]
    return None


def _choices(value: Any) -> dict[str, str]:
    """Letter -> text, of a list or a mapping."""
    if isinstance(value, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in value.items()}
    if isinstance(value, (list, tuple)):
        return {letter: str(text) for letter, text in zip(string.ascii_uppercase, value)}
    return {}


def _valid_letters(metadata: Mapping[str, Any], choices: Mapping[str, str]) -> str:
    given = metadata.get("valid_letters")
    if given:
        return "".join(str(letter).upper() for letter in given)
    return "".join(sorted(k for k in choices if len(k) == 1)) or VALID_LETTERS


def _plain(text: Any) -> str:
    """Lower case, words apart by one blank, nothing else."""
    return _NOT_ALPHANUMERIC.sub(" ", str(text).lower()).strip()


VALID_LETTERS = string.ascii_uppercase[:10]
"""A to J, unless `metadata["valid_letters"]` or the number of choices says otherwise."""

_BLANKS = re.compile(r"\s{2,}")
_STRUCK = re.compile(
    r"~~[^~\n]*~~|<(del|s|strike)>.{0,200}?</\1>|<!--.{0,200}?-->|\\[bx]?(?:cancel|sout|xout|phantom)\s*\{[^{}]*\}",
    re.DOTALL | re.IGNORECASE,
)
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
_ONLY = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_WORD = re.compile(r"\s+(?!(?:is|because|since|as|or|and)\b)[a-z]")
_DENIED_BEFORE = re.compile(
    r"(?:(?:(?:\b|can)not|n['\u2019]t|\bnever|\bneither|\bnor|\bno|\brather than|\binstead of|\bexcept(?: for)?"
    r"|\bnicht|\bkeine?|\bkeinesfalls|\bniemals|\balles au(?:\u00df|ss)er|\bpas|\bjamais|\btout sauf|\bno es"
    r"|\bnunca es|\btodo menos"
    r"|\bother than|\b(?:any|every)thing but|\ball but|\bruled? out|\b(?:eliminat|exclud|reject|discard|doubt)\w*)\s+"
    r"(?:necessarily\s+)?(?:(?:be|choose|select|pick)\s+)?(?:the\s+)?(?:(?:option|choice|answer|letter)s?\s*)?"
    r"|\\(?:neg|lnot|not|neq?)\s*|[!\u00ac]|\u4e0d\u662f)[(\[{*\s\"'$]*\Z",
    re.IGNORECASE,
)
_DENIED_PHRASE = re.compile(
    r"(?:\b(?:not (?:true|so|the case)|wrong|incorrect|false)(?: to say)? that|\bwrong to say|\bdoubt(?: that)?"
    r"|(?:\bnot|n['\u2019]t) (?:think|believe|say)(?: that)?)"
    r"(?:\s+(?:the|my)(?:\s+(?:correct|right|final|best))?(?:\s+(?:answer|option|choice)\s+is)?)?\s*\Z",
    re.IGNORECASE,
)
"""Before a phrase that names a letter: `I doubt that the` answer is B."""
_DENIED_AFTER = re.compile(
    r"[)\]}*\"'$]*\s*(?:(?:is|was|are|seems?|must be|would be|can be)\s+(?:\w+ly\s+)?(?:not|wrong|incorrect|false"
    r"|ruled out|excluded|eliminated|impossible|unlikely)\b|(?:is|was|does|ca|wo)n['\u2019]t\b|can\s?not\b|does not\b"
    r"|(?:ist|est|es)\s+(?:nicht|falsch|faux|fausse|pas|incorrect[oa]?|fals[oa])\b"
    r"|[?,.\u2192]?\s*(?:I (?:guess|think)\s+)?(?:no|not)\b(?=\W*(?:\Z|wait\b)))",
    re.IGNORECASE,
)
_JOINED = (
    r"(?:[,/&;?+|\\\u3001\u6216\u548c]|\\(?:lor|vee|land|wedge)\b"
    r"|\b(?:or|and|then|maybe|perhaps|possibly|actually|plus|as well as|along with|oder|und|ou|et|o|y)\b"
    r"|\bit(?:['\u2019]s| is)|\b(?:option|choice|letter)\b)"
)
_SEVERAL_AFTER = re.compile(
    rf"[)\]}}*\"'$.?!]*(?:[ \t]*[(\[{{]?(?i:{_JOINED})){{0,4}}[ \t]*[(\[{{*\"'$]*([A-Z]){_ENDS}"
)
_SEVERAL_BEFORE = re.compile(rf"(?<![A-Za-z])[A-Z][)\]}}*\"'$.]*\s*(?i:{_JOINED})\s*(?:(?:or|and)\s+)?[(\[{{*\"'$]*\Z")
_RETRACTED = re.compile(
    r"\b(?:that|this|it|which)(?:['\u2019]s| is| was) (?:wrong|incorrect|false|not (?:right|correct))\b"
    r"|\bscratch that\b|\bI (?:was wrong|retract|take (?:it|that) back)\b|\bcorrection:",
    re.IGNORECASE,
)


def chosen_letter(response: str, letters: str = VALID_LETTERS) -> str | None:
    """The letter that the response settles on; None when it names none, or several, or takes it back."""
    response = _STRUCK.sub(" ", _BLANKS.sub(_blank, unicodedata.normalize("NFKC", response)))
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


def _blank(match: re.Match[str]) -> str:
    """Runs of blanks are one, since patterns with several in a row take their length to that power."""
    return "\n" if "\n" in match[0] else " "


def _is_denied(match: re.Match[str], text: str) -> bool:
    if _DENIED_PHRASE.search(text, max(0, match.start() - 60), match.start()):
        return True
    before = (_DENIED_BEFORE.search(text, max(0, place - 60), place) for place in {match.start(), match.start(1)})
    return any(before) or bool(_DENIED_AFTER.match(text, match.end(1)))


def _is_word(match: re.Match[str], text: str) -> bool:
    """The article or the pronoun: `A dog`, `I think`."""
    return match[1] in "AIai" and bool(_WORD.match(text, match.end(1)))
