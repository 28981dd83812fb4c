r"""`slime.rollout.rm_hub.math_utils`: boxes, and the graders of the plugin `slime-reward-deepscaler`.

`grade_answer_sympy` does not evaluate what would not fit in memory (`9^{9^{9}}`), and has no time limit of its own; a
reward has one (`--rm-timeout`).
"""

from __future__ import annotations

import re
from typing import Any

from slime import _missing
from slime_core.plugins.boxed import last_boxed

_PLUGIN = ("slime_reward_deepscaler", "slime-reward-deepscaler")


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}`, or without one the last `\fbox{...}`, braces included; None without one that closes."""
    command = "\\boxed" if "\\boxed" in string else "\\fbox"
    content = last_boxed(string.replace(command, "\\boxed"))
    return None if content is None else f"{command}{{{content}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""What stands in a text that is one `\boxed{...}`; None for anything else."""
    match = re.fullmatch(r"\\boxed\{(.*)\}", s or "", re.DOTALL)
    return match[1] if match else None


def extract_boxed_answer(solution: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None without one that closes."""
    return last_boxed(solution)


def extract_answer(passage: str) -> str | None:
    r"""The same: the answer in the last `\boxed{...}`, or None."""
    return last_boxed(passage)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """The answer in the spelling of the MATH data set; None stays None. Raises ImportError."""
    if answer is None:
        return None
    normalized: str = _spelling(f"{__name__}.mathd_normalize_answer")(answer)
    return normalized


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether both are spelt alike once normalised as in the MATH data set. Raises ImportError."""
    normalized = _spelling(f"{__name__}.grade_answer_mathd")
    expected = normalized(str(ground_truth))
    return bool(expected) and normalized(str(given_answer)) == expected


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether both are equal as expressions, tuples and intervals part by part; fractions must be reduced.

    Raises:
        ImportError: The plugin is not installed.
    """
    module = _missing.plugin(*_PLUGIN, f"{__name__}.grade_answer_sympy")
    return bool(module.equal(str(given_answer), str(ground_truth)))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    """THUDM/slime's `rm_type math`: the box of the solution against the ground truth, boxed or not.

    False without a box or without a ground truth. Raises ImportError.
    """
    expected = last_boxed(str(ground_truth)) if "\\boxed" in str(ground_truth) else str(ground_truth)
    given = last_boxed(solution_str)
    if not given or not expected:
        return False
    return grade_answer_mathd(given, expected) or grade_answer_sympy(given, expected)


def _spelling(wanted_by: str) -> Any:
    _missing.plugin(*_PLUGIN, wanted_by)
    return _missing.plugin("slime_reward_deepscaler.spelling", _PLUGIN[1], wanted_by).normalized


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
