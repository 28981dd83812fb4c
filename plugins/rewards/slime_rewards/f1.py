"""Token F1 between response and label, the measure of extractive question answering (Rajpurkar et al., SQuAD, 2016).

Both sides are lower-cased and stripped of punctuation, articles and repeated blanks. The sign and the point of a number
are not punctuation; curly quotes and the marks of other scripts are, unlike in SQuAD's script. The answers yes, no and
noanswer must match exactly, since they share no meaning with longer texts. A label of one character (A is a choice, not
an article), one of punctuation alone, and an empty label or list, which means that there is no answer, must also match
exactly. A whole number of type float counts as an integer. The best score over a list of labels counts.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

from slime_core import Args, RewardTraits, Sample, declares, right_answers

_ARTICLES = ("a", "an", "the")
_MARK = re.compile(r"(?!(?<![\w.])-(?=[\d.])|(?<=\d)[./](?=\d))(?:[^\w\s]|_)")
_EXACT = {"yes", "no", "noanswer"}


@declares(RewardTraits(execution="thread"))
def reward(args: Args, sample: Sample) -> float:
    """Return F1 in [0, 1]. Raises ValueError if the label cannot be read (`right_answers`)."""
    labels = [""] if sample.label in ("", [], [""]) else right_answers(sample.label)
    return max(f1_score(sample.response, label) for label in labels)


def f1_score(prediction: str, label: str) -> float:
    """Return F1 = 2 P R / (P + R) over multisets of normalised tokens; two empty sets are equal, as in SQuAD 2.0."""
    predicted, expected = normalized_tokens(prediction), normalized_tokens(label)
    if label.strip() and not expected:
        return float(prediction.strip() == label.strip())
    if len(label.strip()) == 1:
        return float(_words(prediction) == _words(label))
    if not predicted or not expected:
        return float(predicted == expected)
    if predicted != expected and (" ".join(predicted) in _EXACT or " ".join(expected) in _EXACT):
        return 0.0
    common = (Counter(predicted) & Counter(expected)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def normalized_tokens(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles (unless all words are articles)."""
    words = _words(text)
    return [word for word in words if word not in _ARTICLES] or words


def _words(text: str) -> list[str]:
    return _MARK.sub(_no_punctuation, text.lower().replace("\u2212", "-")).split()


def _no_punctuation(match: re.Match[str]) -> str:
    """Return "" for punctuation of any script; keep other signs, such as vowels written as marks."""
    mark = match[0]
    return "" if mark in string.punctuation or unicodedata.category(mark)[0] == "P" else mark
