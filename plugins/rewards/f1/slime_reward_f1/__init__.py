"""Token F1 between response and label, the measure of extractive question answering (Rajpurkar et al., SQuAD, 2016).

Both sides are lower-cased and stripped of punctuation (the sign and the point of a number are none; unlike in SQuAD's
script, curly quotes and the marks of other scripts are punctuation, too), articles and repeated blanks. The answers
yes, no and noanswer share no meaning with longer texts, so they must match exactly, and so must a label of one
character (A is a choice, not an article) and an empty one, which says that there is no answer. A label that is a whole
number of type float is that integer, and the best of a list of labels counts.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares

_ARTICLES = ("a", "an", "the")
_MARK = re.compile(r"(?!(?<![\w.])-(?=[\d.])|(?<=\d)[./](?=\d))(?:[^\w\s]|_)")
_EXACT = {"yes", "no", "noanswer"}


@declares(RewardTraits(execution="thread"))
def reward(args: Args, sample: Sample) -> float:
    """Return F1 in [0, 1]; 0.0 without a label."""
    labels = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    return max((f1_score(sample.response, _text(label)) for label in labels if label is not None), default=0.0)


def _text(label: Any) -> str:
    return str(int(label) if isinstance(label, float) and label.is_integer() else label)


def f1_score(prediction: str, label: str) -> float:
    """F1 = 2 P R / (P + R) over the multisets of normalised tokens; two that are empty are equal, as in SQuAD 2.0."""
    predicted, expected = normalized_tokens(prediction), normalized_tokens(label)
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
    """Lower case, no punctuation, no articles (unless there is nothing else), split at blanks."""
    words = _words(text)
    return [word for word in words if word not in _ARTICLES] or words


def _words(text: str) -> list[str]:
    return _MARK.sub(_no_punctuation, text.lower().replace("\u2212", "-")).split()


def _no_punctuation(match: re.Match[str]) -> str:
    """Nothing for punctuation of any script; other signs, such as vowels written as marks, stay."""
    mark = match[0]
    return "" if mark in string.punctuation or unicodedata.category(mark)[0] == "P" else mark
