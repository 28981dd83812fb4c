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
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares
from slime_rewards.gpqa.letters import VALID_LETTERS, chosen_letter

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
