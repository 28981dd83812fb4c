r"""`slime.rollout.rm_hub.math_utils`: boxes, and the graders of the reward `deepscaler`.

`grade_answer_sympy` does not evaluate expressions that would not fit in memory (`9^{9^{9}}`). It has no time limit of
its own; a reward has one (`--rm-timeout`).
"""

from __future__ import annotations

import re
from typing import Any

from slime import _missing
from slime_core.plugins.answers import last_boxed

_PLUGIN = "slime_rewards.deepscaler"


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}`, or else the last `\fbox{...}`, with its braces; None if none is closed."""
    command = "\\boxed" if "\\boxed" in string else "\\fbox"
    content = last_boxed(string.replace(command, "\\boxed"))
    return None if content is None else f"{command}{{{content}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of a text that is exactly a `\boxed{...}`; None for any other text."""
    match = re.fullmatch(r"\\boxed\{(.*)\}", s or "", re.DOTALL)
    return match[1] if match else None


def extract_boxed_answer(solution: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or None if none is closed."""
    return last_boxed(solution)


def extract_answer(passage: str) -> str | None:
    r"""Return the answer in the last `\boxed{...}`, or None; the same as `extract_boxed_answer`."""
    return last_boxed(passage)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return the answer in the spelling of the MATH data set; None stays None. Raises ImportError."""
    if answer is None:
        return None
    normalized: str = _spelling(f"{__name__}.mathd_normalize_answer")(answer)
    return normalized


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether both answers are equal after the MATH data set's normalisation. Raises ImportError."""
    normalized = _spelling(f"{__name__}.grade_answer_mathd")
    expected = normalized(str(ground_truth))
    return bool(expected) and normalized(str(given_answer)) == expected


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether both answers are equal expressions; tuples and intervals by part, fractions must be reduced.

    Raises:
        ImportError: The plugin is not installed.
    """
    module = _missing.plugin(_PLUGIN, f"{__name__}.grade_answer_sympy")
    return bool(module.equal(str(given_answer), str(ground_truth)))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """Compare the solution's box with the ground truth, boxed or not, like THUDM/slime's `rm_type math`.

    Return False without a box or without a ground truth. Raises ImportError.
    """
    expected = last_boxed(str(ground_truth)) if "\\boxed" in str(ground_truth) else str(ground_truth)
    given = last_boxed(solution_str)
    if not given or not expected:
        return False
    return grade_answer_mathd(given, expected) or grade_answer_sympy(given, expected)


def _spelling(wanted_by: str) -> Any:
    _missing.plugin(_PLUGIN, wanted_by)
    return _missing.plugin(f"{_PLUGIN}", wanted_by).normalized


__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
]
__getattr__ = _missing.names(__name__)
