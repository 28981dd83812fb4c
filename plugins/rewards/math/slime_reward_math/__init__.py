r"""Reward 1.0 if response and label are mathematically equal, else 0.0.

The answer is the content of the last `\boxed{...}`. Without a box it is the expression that math-verify finds in the
last 500 characters (LaTeX first, then a plain expression). A response that is a bare expression (`boxed_math` passes
the box's content) is read as if it were boxed. The label may be boxed or bare, a number, or a list (also as text,
`["34"]`), of which any is right.

Answer and label are brought into a common spelling (`spelling`), split into parts (`shape`) and compared as exact
values by sympy (`values`), within 2 s of processor time (`limit`). Answers whose powers or factorials would not fit in
memory (`9^{9^{9}}`, `size`) equal only labels with the same spelling. Without a box, a number that is denied (`not 4`,
`4 is wrong`), quoted, or next to `or` is not read.

A bound on the processor time of a call that holds in every thread of a process, and leaves nothing running.

A second thread watches the caller's processor clock and raises an exception in the caller when its time is used up.
The caller is pure Python (sympy, antlr): what the interpreter does in C without a pause is kept short by `size`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import math_verify
from sympy.core.cache import clear_cache

from slime_core import Args, RewardTraits, Sample, declares, last_boxed, right_answers, same_number
from slime_core.waits import raise_in, take_late
from slime_reward_math.shape import same_answer
from slime_reward_math.size import explodes
from slime_reward_math.spelling import canonical
from slime_reward_math.values import nearly_equal

__all__ = ["equal", "equal_contents", "explodes", "extract_answer", "final_answer", "reward", "within"]

for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its time limits are off

_OPENING = r"\boxed{"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
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
    rf"|(?<![\w.,$\\])\$?-?(?:\d[\d.,/]*(?:_\{{?\w+\}}?)?|\\[\w.,\\{{}}/^]+)\$?\s+"
    r"(?:(?:is|was|are|seems|must be|would be)\s+(?:\w+ly\s+)?"
    rf"(?:not|wrong|incorrect|false|impossible)\b|(?:is|was|does|ca|wo)n['\u2019]t\b|can\s?not\b|does not\b"
    r"|(?:ist|est|es)\s+(?:nicht|falsch|faux|fausse|pas|incorrect[oa]?|fals[oa])\b)"
    r"|\"[^\"\n]*\""
    rf"|(?<![\w.,$])\$?-?\d[\d.,/]*\$?(?:\s*,\s*\$?-?\d[\d.,/]*\$?)*,?\s+or\s+\$?-?\d[\d.,/]*\$?",
    re.IGNORECASE,
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)\s+(?=\d)")
_PERCENT = re.compile(r"\\?%\s*$")
_UNSAID = re.compile(r"\\(?:[hv]?phantom|[bx]?cancel|sout|neg|lnot|not(?!in|\s*=))(?![A-Za-z])|\u00ac")
"""Commands whose content is not shown, or is denied."""
_ROUGHLY = re.compile(
    r"\\(?:approx(?:eq)?|thickapprox|sime?q?|cong|doteq|asymp)(?![A-Za-z])|[\u2248\u2243\u2245\u223c]|^\s*~"
)
_SECONDS = 1.5
"""Processor time of a comparison in seconds; sympy's own calls can exceed it by a fraction of a second."""


def extract_answer(sample: Sample) -> str | None:
    r"""Return the content of the answer's box without spaces, for votes; None for prose without a box.

    Equal expressions with different spellings count as different answers.
    """
    answer = final_answer(sample.response)
    return _squeezed(answer[len(_OPENING) : -1]) or None if answer.startswith(_OPENING) else None


@declares(RewardTraits(extract_answer=extract_answer))
def reward(args: Args, sample: Sample) -> float:
    """Return 1.0 if response and label are equal, else 0.0; also 0.0 if either is no mathematics.

    Raises:
        ValueError: The label cannot be read (`right_answers`).
    """
    labels, answer = right_answers(sample.label, parses=True), final_answer(sample.response)
    boxes = [last_boxed(label) for label in labels]
    contents = [label.strip() if box is None else box for label, box in zip(labels, boxes)]
    return float(any(equal(answer, f"{_OPENING}{content}}}") for content in contents))


def final_answer(response: str) -> str:
    r"""Return the last `\boxed{...}` with its braces, else the last 500 characters; "" if the box never closes.

    A response that is an expression without prose is put into a box.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return f"{_OPENING}{boxed}}}"
    if _BOX.search(response):
        return ""
    bare = response.strip()
    is_expression = bare and len(bare) <= _TAIL and "$" not in bare and not _PROSE.search(bare)
    return f"{_OPENING}{bare}}}" if is_expression else _DENIED.sub(" ", response[-_TAIL:])


def equal(answer: str, label: str) -> bool:
    """Return true if both are the same number, have the same spelling, or are equal by parts (`shape.same_answer`).

    Args:
        answer: Result of `final_answer`.
        label: The label in a box.
    """
    given, expected = _content(answer), _content(label)
    if expected is None:
        return False
    if given is None:
        return _bounded(lambda: _same_contents(_found(answer), expected))
    return equal_contents(given, expected)


def equal_contents(answer: str, label: str) -> bool:
    """Return true if an answer and a label, both without a box, are equal; takes at most 2 s of processor time."""
    return _bounded(lambda: _same_contents(answer, label))


def _bounded(call: Callable[[], bool]) -> bool:
    """Return the result of `call`; False if it takes too long or the answer is nested too deeply."""
    try:
        result = within(_SECONDS, call)
    except RecursionError:
        return False
    if result is None:
        clear_cache()  # drop partial results
    return bool(result)


def _same_contents(answer: str, label: str) -> bool:
    percents = _PERCENT.search(answer), _PERCENT.search(label)
    same = same_number(*(_PERCENT.sub("", text) if any(percents) else text for text in (answer, label)))
    if same or not label.strip():
        return bool(same)
    if (same is False and not any(percents)) or len(answer) > _MAX_ANSWER:
        return False
    if _UNSAID.search(answer) and not _UNSAID.search(label):
        return False
    exact, *rounded = map(canonical, _ROUGHLY.split(answer))
    if rounded and nearly_equal(_last_side(exact), rounded[-1]) and same_answer(exact, canonical(label)):
        return True
    if rounded and same_number(label, label) and "." not in label:
        return False
    return same_answer(canonical(answer), canonical(label))


def _last_side(equation: str) -> str:
    return equation.rpartition("=")[2]


def _content(box: str) -> str | None:
    r"""Return the content of a text that is a single `\boxed{...}`; None for another text."""
    return box[len(_OPENING) : -1] if box.startswith(_OPENING) and box.endswith("}") else None


def _found(prose: str) -> str:
    """Return the expression that math-verify finds in a text without a box, in its original spelling; "" if none."""
    found = math_verify.parse(prose, parsing_timeout=None)
    return str(found[-1]) if found else ""


def _squeezed(text: str) -> str:
    return "".join(_BETWEEN_DIGITS.sub("~", text).split())  # `4 5` is not 45


T = TypeVar("T")

_AGAIN_S = 0.2
"""Processor seconds after which the exception is raised once more, where a library has caught it."""


class _OverTime(BaseException):
    """Raised in the thread that runs the call; no `except Exception` of a library catches it."""


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return what `call` returns; None once it has used that many seconds of this thread's processor time."""
    thread, over, raised = threading.get_ident(), threading.Event(), threading.Event()
    clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        raised_at = end
        while not over.wait(max(raised_at - time.clock_gettime(clock), 0.01)):
            if time.clock_gettime(clock) >= raised_at:
                raised.set()
                raise_in(thread, _OverTime)
                raised_at = time.clock_gettime(clock) + _AGAIN_S

    watcher = threading.Thread(target=watch, name="slime-math-limit", daemon=True)
    watcher.start()
    result: T | None = None
    called = ended = False
    while not ended:  # twice when the exception comes while the call ends
        try:
            if not called:
                called = True
                try:
                    result = call()
                finally:
                    over.set()
            over.set()
            watcher.join()
            if raised.is_set():
                take_late(_OverTime)
            ended = True
        except _OverTime:
            continue
    return result
