"""Rewards for `smollm2.yaml`: a sentence of 6 to 14 words that has the word, and is about the topic.

Two answers that a first version of this reward paid show how a model finds gaps: "A cloud is a cloud." has the word
(see `naive`), and "A short sentence about music using the word cloud" has the topic, too, so what repeats the prompt
gets nothing.
"""

import re

from slime_core import Sample


def reward(args: object, sample: Sample) -> float:
    """1.0 for a finished sentence with the word, once, and the topic; 0.5 without the topic; else 0.0."""
    if sample.status != Sample.Status.COMPLETED:
        return 0.0
    words = _words(sample)
    if words.count(sample.label["word"]) != 1 or not 6 <= len(words) <= 14 or {"sentence", "word"} & set(words):
        return 0.0
    return 1.0 if sample.label["topic"] in words else 0.5


def naive(args: object, sample: Sample) -> float:
    """1.0 if the word is there. The model learns to write "A cloud is a cloud.": try it, with --kl-loss-coef 0."""
    return float(sample.label["word"] in _words(sample))


def _words(sample: Sample) -> list[str]:
    return re.findall(r"[a-z]+", sample.response.replace("<|im_end|>", "").lower())
