r"""Reward 1.0 when response and label are mathematically equal, judged by math-verify, else 0.0.

The answer is the content of the last `\boxed{...}`; without a box, what math-verify finds in the last 500
characters (LaTeX first, then a plain expression). A response that is one bare expression (`boxed_math` passes the box's
content) is read as if it were boxed. The label may be boxed or bare.

math-verify's own time limits are built on SIGALRM, which works in no thread but the main one, and rewards may be scored
in threads. They are switched off here; the deadline of a score is `--rm-timeout`. Since no deadline can interrupt an
evaluation inside the interpreter's big-integer code, answers whose powers or factorials would not fit in memory
(`9^{9^{9}}`, `size.py`) are refused before they are evaluated: they score 1.0 only when spelt as the label is. Without
a box, a number that is denied (`not 4`, `4 is wrong`) or quoted, or beside `or`, is not read.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import math_verify

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, same_number
from slime_reward_math.size import explodes

__all__ = ["equal", "explodes", "extract_answer", "final_answer", "reward"]

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its time limits are off

_OPENING = r"\boxed{"
_TAIL = 500
_MAX_ANSWER = 1000
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}|\n")
_VALUE = r"[$({\s]*[-+]?\\?[\w.,\\{}/^]+[)}$]*"
_DENIED = re.compile(
    rf"(?:\bnot|n['\u2019]t|\bnever|\bneither|\bnor|\brather than|\binstead of|\banything but|\bexcept"
    rf"|\bnicht|\bkeine?|\bkeinesfalls|\bniemals|\balles au(?:\u00df|ss)er|\bpas|\bjamais|\btout sauf|\bno es"
    r"|\bnunca es|\btodo menos)\s+"
    r"(?:(?:be|equals?|to|the|number|answer|simply|just|exactly|is|gleich|die|\u00e9gal \u00e0|igual a)\s+)*"
    rf"(?=[$(\s]*[-+\d\\]){_VALUE}"
    rf"|(?<![\w.,$\\])\$?-?(?:\d[\d.,/]*|\\[\w.,\\{{}}/^]+)\$?\s+"
    r"(?:(?:is|was|are|seems|must be|would be)\s+(?:\w+ly\s+)?"
    rf"(?:not|wrong|incorrect|false|impossible)\b|(?:is|was|does|ca|wo)n['\u2019]t\b|can\s?not\b|does not\b"
    r"|(?:ist|est|es)\s+(?:nicht|falsch|faux|fausse|pas|incorrect[oa]?|fals[oa])\b)"
    r"|\"[^\"\n]*\""
    rf"|(?<![\w.,$])\$?-?\d[\d.,/]*\$?(?:\s*,\s*\$?-?\d[\d.,/]*\$?)*,?\s+or\s+\$?-?\d[\d.,/]*\$?",
    re.IGNORECASE,
)
_OTHER_THAN_A_NUMBER = re.compile(
    r"\\(?:neq?|not|neg|lnot|leq?|geq?|leqslant|geqslant|lt|gt|ll|gg|phantom|[hv]phantom|[bx]?cancel|sout)(?![A-Za-z])"
    r"|[<>\u2260\u2264\u2265\u00ac]|_(?!\{?10(?!\d))"
    r"|\d(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z])|\{\})+\d(?!\d\d(?!\d))"
)
"""Relations, what is not shown, a base, and two numbers side by side, all of which math-verify reads over."""
_ROUGHLY = re.compile(
    r"\\(?:approx(?:eq)?|thickapprox|sime?q?|cong|doteq|asymp)(?![A-Za-z])|[\u2248\u2243\u2245\u223c]|^\s*~"
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)\s+(?=\d)")
_PERCENT = re.compile(r"\\?%\s*$")


def extract_answer(sample: Sample) -> str | None:
    r"""What the answer's box holds, without its spaces, for votes; None of a response that is prose without a box.

    Equal expressions that are spelt differently are two answers.
    """
    answer = final_answer(sample.response)
    return _squeezed(answer[len(_OPENING) : -1]) or None if answer.startswith(_OPENING) else None


@declares(RewardTraits(extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    """1.0 or 0.0; anything that cannot be parsed, on either side, is 0.0."""
    if sample.label is None:
        return 0.0
    label = str(sample.label).strip()
    label = label if _OPENING in label else f"{_OPENING}{label}}}"
    return float(equal(final_answer(sample.response), label))


def final_answer(response: str) -> str:
    r"""The last `\boxed{...}` with its braces, else the last 500 characters; empty when the box never closes.

    A response that is an expression and no prose is boxed.
    """
    start = response.rfind(_OPENING)
    if start < 0:
        bare = response.strip()
        is_expression = bare and len(bare) <= _TAIL and "$" not in bare and not _PROSE.search(bare)
        return f"{_OPENING}{bare}}}" if is_expression else _DENIED.sub(" ", response[-_TAIL:])
    boxed = last_boxed(response)
    return "" if boxed is None else f"{_OPENING}{boxed}}}"


def equal(answer: str, label: str) -> bool:
    """True when both are one number, are spelt alike, or parse and math-verify calls them equal."""
    content, expected_content = _content(answer), _content(label)
    same = same_number(content, expected_content)  # first, since without blanks `1 1/2` is 11/2
    if same or (same is None and _squeezed(answer) == _squeezed(label)):
        return _squeezed(label) != _OPENING + "}"
    rough = _ROUGHLY.search(content) and "." not in expected_content
    if same_number(expected_content, expected_content) and (rough or not _may_be_number(content)):
        return False
    if not answer or len(answer) > _MAX_ANSWER or explodes(answer):
        return False
    found, expected = _parsed(answer), _parsed_label(label)
    return bool(found and expected and math_verify.verify(expected, found, timeout_seconds=None))


def _content(box: str) -> str:
    r"""What a text that is one `\boxed{...}` holds, without a percent sign: 50% is 50 (and, to math-verify, 0.5)."""
    return _PERCENT.sub("", box[len(_OPENING) : -1]) if box.startswith(_OPENING) and box.endswith("}") else ""


def _may_be_number(content: str) -> bool:
    """No relation but an equation, whose numbers are one: `2+2=4`, and neither `5=4` nor `>4`."""
    sides = content.split("=")
    numbers = [side for side in sides if same_number(side, side)]
    return not _OTHER_THAN_A_NUMBER.search(content) and all(same_number(numbers[0], other) for other in numbers[1:])


def _parsed(text: str) -> list[Any]:
    return list(math_verify.parse(text, parsing_timeout=None))


@functools.lru_cache(maxsize=4096)
def _parsed_label(label: str) -> list[Any]:
    """The samples of a group share their label."""
    return _parsed(label)


def _squeezed(text: str) -> str:
    return "".join(_BETWEEN_DIGITS.sub("~", text).split())  # `4 5` is not 45
