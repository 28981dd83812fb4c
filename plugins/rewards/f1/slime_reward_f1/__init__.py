"""Token F1 between response and label, the measure of extractive question answering (Rajpurkar et al., SQuAD, 2016).

Both sides are lower-cased and stripped of punctuation (the sign and the point of a number are none), articles and
repeated blanks. The answers yes, no and noanswer share no meaning with longer texts, so they must match exactly, and so
must a label of one character (A is a choice, not an article) and an empty one, which says that there is no answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from slime_core import Args, RewardTraits, Sample, declares

_ARTICLES = ("a", "an", "the")
_PUNCTUATION = re.compile(rf"(?!(?<![\w.])-(?=[\d.])|(?<=\d)[./](?=\d))[{re.escape(string.punctuation)}]")
_EXACT = {"yes", "no", "noanswer"}


@declares(RewardTraits(execution="thread"))
def reward(args: Args, sample: Sample) -> float:
    """F1 in [0, 1]; 0.0 without a label."""
    return 0.0 if sample.label is None else f1_score(sample.response, str(sample.label))


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
    return _PUNCTUATION.sub("", text.lower()).split()
