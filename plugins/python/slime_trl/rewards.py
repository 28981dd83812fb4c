"""The rewards of `trl.rewards` that its examples use, over slime's graders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime_reward_math import equal, final_answer

from slime_core import last_boxed

_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*", re.DOTALL)


def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    """Return 1 for answers that equal the solution by the reward `math`, 0 for others, None for an empty solution."""
    return [_accuracy(_text(completion), right) for completion, right in zip(completions, solution)]


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Return 1 for completions that think once between `<think>` and `</think>`, before the answer, else 0."""
    return [float(_THOUGHT.fullmatch(_text(completion)) is not None) for completion in completions]


def _accuracy(text: str, solution: str) -> float | None:
    if not str(solution).strip():
        return None
    box = last_boxed(str(solution))
    content = str(solution).strip().strip("$") if box is None else box
    return float(equal(final_answer(text), f"\\boxed{{{content}}}"))


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
