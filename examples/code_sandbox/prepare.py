r"""Inputs of `train.yaml`: products and sums of three-digit numbers, and a model that seldom lets code compute them.

A problem is `123*456=?`, to be answered `\boxed{56088}`. The warm-up shows two ways: code (`<code>123*456</code>`,
which the sandbox runs, and answers `56088`), and answering directly, which a tiny model cannot learn. It ends with one
in five writing code; reinforcement learning has to find out that code pays.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from slime_command_init.warmup import PHASES, Recipe, make_missing_model, write_missing

Problem: TypeAlias = tuple[int, str, int]

RECIPE = Recipe("code_sandbox")
NUM_TRAIN, NUM_HELD_OUT = 4000, 128
NUM_CODING = 6500
"""Examples of the first warm-up phase, all with code."""
NUM_MIXED = 1500
"""Examples of the second."""
CODING_SHARE = 0.2
"""Of the second phase's examples, how many have code."""
_SPLIT_SEED = 20262


def prepare(args: Any) -> None:
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
    """What the code prints."""
    a, operator, b = problem
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def rows(some: list[Problem]) -> list[dict[str, str]]:
    """Rows of `--prompt-data`."""
    return [{"input": f"{_written(problem)}=?", "label": str(value(problem))} for problem in some]


def warmup(train: list[Problem], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Conversations of the two phases."""
    rng = random.Random(seed)
    coding = [_conversation(problem, code=True) for problem in rng.choices(train, k=NUM_CODING)]
    mixed = [_conversation(p, code=rng.random() < CODING_SHARE) for p in rng.choices(train, k=NUM_MIXED)]
    return coding, mixed


def _written(problem: Problem) -> str:
    return "".join(map(str, problem))


def _conversation(problem: Problem, *, code: bool) -> dict[str, Any]:
    ran = [
        {"role": "assistant", "content": f"<code>{_written(problem)}</code>"},
        {"role": "tool", "content": str(value(problem))},
    ]
    question = {"role": "user", "content": f"{_written(problem)}=?"}
    answer = {"role": "assistant", "content": rf"\boxed{{{value(problem)}}}"}
    return {"messages": [question, *(ran if code else []), answer]}
