r"""Rewards written for other trainers, each as its project's documentation writes it. Nothing here knows of slime.

    slime train --config demo.yaml --custom-rm-path examples/other_trainers.py:boxed_reward
    slime check --config demo.yaml --custom-rm-path examples/other_trainers.py:compute_score

The names of the parameters say which project a function is for; `slime check` prints what differs from it.
"""

from __future__ import annotations

import re
from typing import Any

_BOX = re.compile(r"\\boxed\{(.*?)\}")


def boxed_reward(completions: list[str], label: list[str], **kwargs: Any) -> list[float]:
    """Return 1 for each right answer: a TRL function, with the column `label` of the data as a list."""
    found = [_BOX.search(completion) for completion in completions]
    return [float(box is not None and box[1] == str(right)) for box, right in zip(found, label)]


async def short_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Return a reward for shortness, or None for an empty answer, to which it does not apply: TRL, async."""
    return [1.0 / len(ids) if ids else None for ids in completion_ids]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Return a mapping whose `score` trains: a verl function."""
    box = _BOX.search(solution_str)
    return {"score": float(box is not None and box[1] == str(ground_truth)), "boxed": float(box is not None)}


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """Return rewards and numbers to log: an OpenRLHF function. `queries` are prompts with their answers."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    rewards = [float(rf"\boxed{{{label}}}" in answer) for answer, label in zip(answers, labels)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"characters": [len(answer) for answer in answers]}}


async def mentions_answer(completion: Any, answer: str) -> float:
    """Return 1 if the answer is in the completion: a function of a verifiers rubric."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return float(str(answer) in text)
