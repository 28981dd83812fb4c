r"""The recipe `calculator` (kind `recipes`): sums and products of three-digit numbers, and a model that seldom asks.

A problem is `123*456=?`, to be answered `\boxed{56088}`. The warm-up shows two ways: calling the calculator
(`<tool>123*456</tool>`, answered `56088`), and answering directly, which a tiny model cannot learn. It ends with one
in five asking; reinforcement learning has to find out that asking pays.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from slime_command_init.warmup import PHASES, Recipe, make_missing_model, write_missing
from slime_core.protocols import Args

Problem: TypeAlias = tuple[int, str, int]

RECIPE = Recipe("calculator")
NUM_TRAIN, NUM_HELD_OUT = 6000, 200
NUM_ASKING = 6500
"""Examples of the first warm-up phase, all with a call."""
NUM_MIXED = 1500
"""Examples of the second."""
ASKING_SHARE = 0.2
"""Of the second phase's examples, how many have a call."""
_SPLIT_SEED = 20261


def prepare(args: Args) -> None:
    """Write what is missing of `--prompt-data`, the files of `--eval-prompt-data`, and `--hf-checkpoint`."""
    train, held_out = problems()
    if args.prompt_data:
        write_missing(args.prompt_data, rows(train))
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, rows(held_out))
    make_missing_model(args, RECIPE, dict(zip(PHASES, warmup(train, args.seed), strict=True)))


def problems() -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, none twice; always the same, whatever the run's seed."""
    rng = random.Random(_SPLIT_SEED)
    found: dict[Problem, None] = {}
    while len(found) < NUM_TRAIN + NUM_HELD_OUT:
        found[rng.randint(100, 999), rng.choice("+-*"), rng.randint(100, 999)] = None
    return list(found)[NUM_HELD_OUT:], list(found)[:NUM_HELD_OUT]


def value(problem: Problem) -> int:
    """The right answer."""
    a, operator, b = problem
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def written(problem: Problem) -> str:
    """`123*456`."""
    return "".join(map(str, problem))


def rows(some: list[Problem]) -> list[dict[str, str]]:
    """Rows of `--prompt-data`."""
    return [{"input": f"{written(problem)}=?", "label": str(value(problem))} for problem in some]


def warmup(train: list[Problem], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Conversations of the two phases."""
    rng = random.Random(seed)
    asking = [_asking(problem) for problem in rng.choices(train, k=NUM_ASKING)]
    mixed = [
        _asking(problem) if rng.random() < ASKING_SHARE else _direct(problem)
        for problem in rng.choices(train, k=NUM_MIXED)
    ]
    return asking, mixed


def _asking(problem: Problem) -> dict[str, Any]:
    calls = [
        {"role": "assistant", "content": f"<tool>{written(problem)}</tool>"},
        {"role": "tool", "content": str(value(problem))},
    ]
    return _conversation(problem, calls)


def _direct(problem: Problem) -> dict[str, Any]:
    return _conversation(problem, [])


def _conversation(problem: Problem, calls: list[dict[str, str]]) -> dict[str, Any]:
    question = {"role": "user", "content": f"{written(problem)}=?"}
    answer = {"role": "assistant", "content": rf"\boxed{{{value(problem)}}}"}
    return {"messages": [question, *calls, answer]}
