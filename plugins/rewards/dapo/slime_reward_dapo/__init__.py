r"""The answer after the last `Answer:` against the label, normalised as in Minerva (Lewkowycz et al., 2022).

Source: DAPO (Yu et al., 2025, arXiv:2503.14476) and THUDM/slime's `dapo`. Only the last 300 characters are read. Score
+1.0 when the normalised answer is spelt as the normalised label or both are one number, else -1.0. `Answer: $A$`,
`Answer: \boxed{A}` and `**Answer:** A` all answer A; text after the answer's line is not read. A line
that denies (`not $A$`) or offers two (`$A$ or $B$`) answers neither.

But for numbers the comparison is of spellings, so x+1 is not 1+x (`math` knows better).
"""

from __future__ import annotations

import re
from typing import Any

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, same_number

TAIL = 300
"""Characters at the end of the response that are read."""

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
    """The normalised answer, for votes."""
    return find_answer(sample.response) or None


@declares(RewardTraits(execution="inline", extract_answer=extract_answer))  # it reads 300 characters
def reward(args: Args, sample: Sample, evaluation: bool = False) -> float | dict[str, Any]:
    """The mapping of `score` when `--reward-key` (or another reader of mappings) is set, else its `score` alone."""
    result = score(sample.response, sample.label)
    key = args.eval_reward_key if evaluation else args.reward_key
    return result if key or args.custom_reward_post_process_path else float(result["score"])


def score(response: str, label: Any) -> dict[str, Any]:
    """`score` (+1.0 or -1.0), `acc` (bool) and `pred` (the normalised answer, or "[INVALID]" without one)."""
    given = _answered(response)
    answer = None if given is None else normalized(given)
    expected = None if label is None else _bare(str(label))
    correct = bool(given and answer and expected is not None and _alike(given, expected))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": "[INVALID]" if answer is None else answer}


def find_answer(response: str) -> str | None:
    """What follows the last `Answer:` of the tail on its line, normalised; None without one."""
    given = _answered(response)
    return None if given is None else normalized(given)


def _answered(response: str) -> str | None:
    tail = _END_TOKENS.sub("", response[-TAIL:])
    markers = list(_MARKER.finditer(tail))
    line = _LINE.match(tail, markers[-1].end()) if markers else None
    return _bare(line[1]) if line else None


def _alike(given: str, expected: str) -> bool:
    """One number as written (normalised, `1 1/2` has no space), spelt alike, or one number once normalised."""
    same = same_number(given.strip().rstrip(".,;:"), expected)
    if same is not None:
        return same
    sides = [side for side in given.split("=") if same_number(side, side)]
    if any(same_number(sides[0], side) is False for side in sides[1:]):
        return False  # 5 = 4
    answer, label = normalized(given), normalized(expected)
    return answer == label or bool(same_number(answer, label))


_APART = re.compile(r"(?<=\d)\s+(?!\d{3}(?!\d))(?=\d)")
"""Between two numbers: `4 5` is not 45, and `1 000` is 1000."""


def normalized(answer: str) -> str:
    """The spelling that is compared: no units, commands, `$` or thousands separators, `=`'s right side, full braces."""
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
    """Without a box or the dollars around it, unless the words beside them deny it or offer another."""
    if _OTHERWISE.search(text):
        return text
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    inside = list(re.finditer(r"(?<!\\)\$(.+?)(?<!\\)\$", text))
    return inside[0][1] if len(inside) == 1 else text
