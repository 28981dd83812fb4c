"""`slime.rollout.rm_hub.f1`: token F1 of two texts, normalised as by SQuAD's script (Rajpurkar et al., 2016).

The reward `f1` keeps an article that is the whole answer; here it goes, as in THUDM/slime.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from slime import _missing

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EXACT = ("yes", "no", "noanswer")


def normalize_answer(s: str) -> str:
    """Lower case, no punctuation, no articles, single blanks."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s.lower().translate(_NO_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str | None) -> tuple[float, float, float]:
    """F1, precision and recall; zeros without a common token, or when one side is yes, no or noanswer and not both."""
    if prediction is None or ground_truth is None:
        return 0.0, 0.0, 0.0
    given, expected = normalize_answer(prediction), normalize_answer(ground_truth)
    common = (Counter(given.split()) & Counter(expected.split())).total()
    if not common or (given != expected and (given in _EXACT or expected in _EXACT)):
        return 0.0, 0.0, 0.0
    precision, recall = common / len(given.split()), common / len(expected.split())
    return 2 * precision * recall / (precision + recall), precision, recall


__all__ = ["f1_score", "normalize_answer"]
__getattr__ = _missing.names(__name__)
