r"""The recipe `calculator` (kind `recipes`): sums and products of three-digit numbers, and a model that seldom asks.

A problem is `123*456=?`, to be answered `\boxed{56088}`. The warm-up shows two ways: calling the calculator
(`<tool>123*456</tool>`, answered `56088`), and answering directly, which a tiny model cannot learn. It ends with one
in five asking; reinforcement learning has to find out that asking pays.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from slime_commands.init.warmup import Recipe, make_missing
from slime_core.protocols import Args

Problem: TypeAlias = tuple[int, str, int]

RECIPE = Recipe("calculator")
NUM_TRAIN, NUM_HELD_OUT = 6000, 200
NUM_ASKING = 6500
"""Examples of the first warm-up phase, all with a call."""
NUM_MIXED = 1500
"""Examples of the second phase."""
ASKING_SHARE = 0.2
"""Share of the second phase's examples that have a call."""
_SPLIT_SEED = 20261


def prepare(args: Args) -> None:
    """Write the missing files of `--prompt-data`, `--eval-prompt-data` and `--hf-checkpoint`."""
    train, held_out = problems()
    make_missing(args, RECIPE, rows(train), rows(held_out), warmup(train, args.seed))


def problems() -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems; they do not depend on the run's seed."""
    return drawn(NUM_TRAIN, NUM_HELD_OUT, _SPLIT_SEED)


def drawn(num_train: int, num_held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw training and held-out problems without repeats."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < num_train + num_held_out:
        found[rng.randint(100, 999), rng.choice("+-*"), rng.randint(100, 999)] = None
    return list(found)[num_held_out:], list(found)[:num_held_out]


def value(problem: Problem) -> int:
    """Return the right answer."""
    a, operator, b = problem
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def rows(some: list[Problem]) -> list[dict[str, str]]:
    """Return rows for `--prompt-data`."""
    return [{"input": f"{''.join(map(str, problem))}=?", "label": str(value(problem))} for problem in some]


def warmup(
    train: list[Problem], seed: int, call: str = "<tool>{}</tool>"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the conversations of the two phases; `call` formats a call for a value."""
    rng = random.Random(seed)
    asking = [_conversation(problem, call) for problem in rng.choices(train, k=NUM_ASKING)]
    mixed = [
        _conversation(problem, call if rng.random() < ASKING_SHARE else None)
        for problem in rng.choices(train, k=NUM_MIXED)
    ]
    return asking, mixed


def _conversation(problem: Problem, call: str | None) -> dict[str, Any]:
    text, result = "".join(map(str, problem)), str(value(problem))
    question = {"role": "user", "content": f"{text}=?"}
    asked = [{"role": "assistant", "content": call.format(text)}, {"role": "tool", "content": result}] if call else []
    return {"messages": [question, *asked, {"role": "assistant", "content": rf"\boxed{{{result}}}"}]}
