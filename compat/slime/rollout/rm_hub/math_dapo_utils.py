r"""`slime.rollout.rm_hub.math_dapo_utils`: the reward `dapo` as functions of texts.

Labels need not be integers here (THUDM/slime passes every label through int).
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.rollout.rm_hub import math_utils
from slime.rollout.rm_hub.math_utils import last_boxed_only_string
from slime_core.plugins.answers import last_boxed

_TAIL = 100
"""Number of final characters that the strict check reads, as in DAPO."""


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    r"""Return `score` (+1.0 or -1.0), `acc` and `pred` of the last `Answer:` in the last 300 characters.

    Args:
        solution_str: The response.
        ground_truth: The label.
        strict_box_verify: Judge the `\boxed{...}` in the last 100 characters instead.
        pause_tokens_index: Not supported; None.

    Raises:
        ValueError: `pause_tokens_index` is given.
        ImportError: The plugin is not installed.
    """
    if pause_tokens_index is not None:
        raise ValueError("compute_score: pause_tokens_index is not supported; leave it out")
    if strict_box_verify:
        score, pred = is_correct_strict_box(solution_str, str(ground_truth))
        return {"score": float(score), "acc": score == 1, "pred": pred}
    answer: dict[str, Any] = _dapo("compute_score").score(solution_str, ground_truth)
    return answer


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Return whether the solution's answer is right, and the answer. Arguments and errors as for `compute_score`."""
    found = compute_score(solution_str, answer, strict_box_verify, pause_tokens_index)
    return bool(found["acc"]), found["pred"]


def remove_boxed(s: str) -> str:
    r"""Return the content of a text that is one `\boxed{...}`. Raises AssertionError for another text."""
    content = math_utils.remove_boxed(s)
    if content is None:
        raise AssertionError(f"no \\boxed{{...}}: {s}")
    return content


def normalize_final_answer(final_answer: str) -> str:
    """Return the normalized answer, which is compared. Raises ImportError."""
    normalized: str = _dapo("normalize_final_answer").normalized(final_answer)
    return normalized


def is_correct_minerva(solution_str: str, gt: str) -> tuple[bool, str]:
    """Return whether the last `Answer:` is the ground truth, and the answer found ("[INVALID]" without one)."""
    found = _dapo("is_correct_minerva").score(solution_str, gt)
    return bool(found["acc"]), str(found["pred"])


def is_correct_strict_box(pred: str, gt: str) -> tuple[int, str | None]:
    r"""Return 1 if the last 100 characters have the ground truth in `\boxed{...}`, else -1, and the box's content."""
    content = last_boxed(pred[-_TAIL:])
    return (1 if content == gt else -1), content


def _dapo(name: str) -> Any:
    return _missing.plugin("slime_rewards.dapo", f"{__name__}.{name}")


__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]
__getattr__ = _missing.names(__name__)
