r"""Compare the answer after the last `Answer:` with the label, normalised as in Minerva (Lewkowycz et al., 2022).

Source: DAPO (Yu et al., 2025, arXiv:2503.14476) and THUDM/slime's `dapo`. Only the last 300 characters are read. The
score is +1.0 if the normalised answer has the spelling of the normalised label or both are the same number, else -1.0.
`Answer: $A$`, `Answer: \boxed{A}` and `**Answer:** A` all give A; text after the answer's line is not read. A line with
a denied answer (`not $A$`) or two answers (`$A$ or $B$`) gives none.

Apart from numbers, spellings are compared, so x+1 does not equal 1+x (use `math` for this).
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, right_answers, same_number

TAIL = 300
"""Number of characters that are read at the end of the response."""

_MARKER = re.compile(r"answer\s*:", re.IGNORECASE)
_LINE = re.compile(r"\s*(?:\*\*)?\s*([^\n]+)")
_END_TOKENS = re.compile(r"<\|[^<>|]*\|>|</s>|<eos>|<end_of_turn>")
_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:(\d)\s*(\d)|\{([^{}]*)\}\s*\{([^{}]*)\})")
_ROOT = re.compile(r"\\sqrt\s*(\w)")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\\,|\{,\})(?=\d{3}(?!\d))")
_UNITS = re.compile(
    r"(?<![A-Za-z])(?:square|cubic|units?|integers?|points?|dollars?|cents?|degrees?|inche?s?|feet|foot|ft|yards?|miles?"
    r"|mph|kmph|meters?|metres?|cm|mm|km|m|hours?|hrs?|minutes?|mins?|seconds?|days?|weeks?|months?|years?|percent"
    r"|liters?|litres?|ml|kg|grams?|g|pounds?|gallons?|edges?|students?|childrens?|multiples|sides|moves?|bottles?"
    r"|times|mod|am|pm|tickets?|apples?)(?![A-Za-z])",
    re.IGNORECASE,
)
_OTHERWISE = re.compile(
    r"\b(?:not|or|never|neither|nor|but|wrong|incorrect|false|instead)\b|n['\u2019]t\b", re.IGNORECASE
)
_INTEGER = re.compile(r"[-+]?\d{1,1000}(?:\.0*)?")


def extract_answer(sample: Sample) -> str | None:
    """Return the normalised answer, for votes."""
    return find_answer(sample.response) or None


@declares(RewardTraits(execution="inline", extract_answer=extract_answer))  # it reads 300 characters
def reward(args: Args, sample: Sample, evaluation: bool = False) -> float | dict[str, Any]:
    """Return the mapping of `score` if `--reward-key` (or another reader of mappings) is set, else only its `score`."""
    result = score(sample.response, sample.label)
    key = args.eval_reward_key if evaluation else args.reward_key
    return result if key or args.custom_reward_post_process_path else float(result["score"])


def score(response: str, label: Any) -> dict[str, Any]:
    """Return `score` (+1.0 or -1.0), `acc` (bool) and `pred` (the normalised answer, or "[INVALID]" without one).

    Any of a list of labels is right.

    Raises:
        ValueError: The label cannot be read (`right_answers`).
    """
    labels, given = right_answers(label, parses=True), _answered(response)
    answer = None if given is None else normalized(given)
    correct = bool(given and answer and any(_alike(given, _bare(text)) for text in labels))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": "[INVALID]" if answer is None else answer}


def find_answer(response: str) -> str | None:
    """Return the normalised text after the last `Answer:` in the tail, up to the line's end; None without a marker."""
    given = _answered(response)
    return None if given is None else normalized(given)


def _answered(response: str) -> str | None:
    tail = _END_TOKENS.sub("", response[-TAIL:])
    markers = list(_MARKER.finditer(tail))
    line = _LINE.match(tail, markers[-1].end()) if markers else None
    return _bare(line[1]) if line else None


def _alike(given: str, expected: str) -> bool:
    """Return True if both are the same number as written, the same normalised text, or the same normalised number.

    Numbers are compared as written first, because normalising removes the space of `1 1/2`.
    """
    same = same_number(given.strip().rstrip(".,;:"), expected)
    if same is not None:
        return same
    sides = [side for side in given.split("=") if same_number(side, side)]
    if any(same_number(sides[0], side) is False for side in sides[1:]):
        return False  # 5 = 4
    answer, label = normalized(given), normalized(expected)
    if label in ("True", "False"):  # a label of a JSON bool
        answer = answer.capitalize()
    return answer == label or bool(same_number(answer, label))


_APART = re.compile(r"(?<=\d)\s+(?!\d{3}(?!\d))(?=\d)")
"""Space between two numbers: `4 5` is not 45, and `1 000` is 1000."""


def normalized(answer: str) -> str:
    """Return the text to compare: no units, commands, `$` or thousands separators; `=`'s right side; full braces."""
    text = _END_TOKENS.sub("", answer).strip()
    text = text.split("=")[-1] if text.count("=") == 1 else text
    text = _COMMANDS.sub(r"\1", text)
    text = _THOUSANDS.sub("", text)
    text = re.sub(r"\\[,;: ]", " ", text)
    text = re.sub(r"\\(?:left|right|!)|\\?\$|\\?%|\^\s*\{?\\circ\}?|\*\*", "", text)
    text = _UNITS.sub("", text)
    text = _FRACTION.sub(lambda m: rf"\frac{{{(m[1] or m[3] or '').strip()}}}{{{(m[2] or m[4] or '').strip()}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = "".join(_APART.sub("~", text).split()).rstrip(".,;:")
    return str(int(text.split(".")[0])) if _INTEGER.fullmatch(text) else text


def _bare(text: str) -> str:
    """Strip a box or dollars around the answer, unless words next to it deny the answer or offer another."""
    if _OTHERWISE.search(text):
        return text
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    inside = list(re.finditer(r"(?<!\\)\$(.+?)(?<!\\)\$", text))
    return inside[0][1] if len(inside) == 1 else text
