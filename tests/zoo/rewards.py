"""Reward functions with a bug."""

from __future__ import annotations

import random
from typing import Any


def of_the_prompt(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reads the prompt where it should read the answer."""
    return sum(map(ord, str(sample.prompt))) % 7 / 7


def always_right(args: Any, sample: Any, **kwargs: Any) -> float:
    """Finds the label everywhere."""
    return 1.0


def at_random(args: Any, sample: Any, **kwargs: Any) -> float:
    """Depends on anything but the answer."""
    return random.random()


def of_the_answer(args: Any, sample: Any, **kwargs: Any) -> float:
    """Sound: another answer, another reward."""
    return sum(map(ord, sample.response)) % 97 / 97
