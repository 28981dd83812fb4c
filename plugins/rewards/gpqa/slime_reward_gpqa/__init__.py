r"""1.0 when the chosen letter is the correct one, else 0.0: multiple choice, as for GPQA (Rein et al., 2023).

The response is read after its last `</think>`. The chosen letter is the first that a phrase such as `the answer is
(B)`, `B is correct` or `\boxed{B}` names, else the last capital letter that stands alone. The correct one comes from
`metadata["correct_letter"]`, a label of one letter, a label that is a number (index of the choice, from 0), or a
label that is the text of one of `metadata["choices"]`. With no letter on one side, the correct choice's text in the
response counts.

The words "I" and "A" are no choices when a lower-case word follows.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares

VALID_LETTERS = string.ascii_uppercase[:10]
"""A to J, unless `metadata["valid_letters"]` or the number of choices says otherwise."""

_LETTER = r"[(\[{*\s\"'$]*(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*([A-Z])(?![A-Za-z'\u2019])"
_PHRASES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i:\b(?:answer|option|choice)\s*(?:is|:|=)\s*(?:the\s+)?(?:(?:option|choice|letter)\s*)?:?)" + _LETTER,
        r"(?<![A-Za-z])([A-Z])[)\].*:\"']*\s+(?i:is\s+(?:the\s+)?(?:correct|right|best)\b)",
        r"(?i:\bfinal\s+answer\b[^A-Za-z\n]{0,10})" + _LETTER,
        r"\\boxed\s*\{" + _LETTER,
        r"(?i:\b(?:choose|select|pick)\s+(?:(?:option|choice|answer)\s+)?)" + _LETTER,
    )
)
_ALONE = re.compile(r"(?<![A-Za-z'\u2019])([A-Z])(?![A-Za-z'\u2019])")
_WORD = re.compile(r"\s+(?!(?:is|because|since|as)\b)[a-z]")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


def extract_answer(sample: Sample) -> str | None:
    """The chosen letter, for votes."""
    letters = _valid_letters(sample.metadata, _choices(sample.metadata.get("choices")))
    return chosen_letter(sample.response.rpartition("</think>")[2], letters)


@declares(RewardTraits(extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    """1.0 or 0.0; without anything that says which choice is correct, 0.0."""
    metadata, response = sample.metadata, sample.response.rpartition("</think>")[2]
    choices = _choices(metadata.get("choices"))
    letters = _valid_letters(metadata, choices)
    correct, chosen = correct_letter(sample.label, metadata, choices, letters), chosen_letter(response, letters)
    if correct and chosen:
        return float(correct == chosen)
    texts = [choices.get(correct or ""), metadata.get("correct_answer"), metadata.get("answer_text")]
    texts += [sample.label] if isinstance(sample.label, str) and not correct and len(sample.label.strip()) > 1 else []
    text = f" {_plain(response)} "
    return float(any(f" {_plain(t)} " in text for t in texts if t is not None and _plain(t)))


def chosen_letter(response: str, letters: str = VALID_LETTERS) -> str | None:
    """The letter that the response settles on; None when it names none."""
    for phrase in _PHRASES:
        found = next((m for m in phrase.finditer(response) if m[1] in letters and not _is_word(m, response)), None)
        if found:
            return found[1]
    alone = [m[1] for m in _ALONE.finditer(response) if m[1] in letters and not _is_word(m, response)]
    return alone[-1] if alone else None


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


def _is_word(match: re.Match[str], text: str) -> bool:
    """The article or the pronoun: `A dog`, `I think`."""
    return match[1] in "AI" and bool(_WORD.match(text, match.end(1)))


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
