r"""The demo's task: `37+48=?`, to be answered `\boxed{85}`, directly or after working digit by digit.

`prepare.py` writes its files from this module. The warm-up shows both ways of answering. The direct answer is hard for
a tiny model and the worked answer is easy; reinforcement learning has to discover this. Held-out problems are separated
by *unordered* pair, so 48+37 is never trained on if 37+48 is held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, TypeAlias

Problem: TypeAlias = tuple[int, int]
"""The two operands."""

OPERANDS = range(10, 100)
NUM_HELD_OUT = 500
NUM_WORKED = 6500
"""Examples of the first warm-up phase, all worked."""
NUM_MIXED = 1500
"""Examples of the second warm-up phase."""
DIRECT_SHARE = 0.8
"""Share of the second phase's examples that answer directly."""
_SPLIT_SEED = 20260


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems, shuffled; the order does not depend on the run's seed."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    random.Random(_SPLIT_SEED).shuffle(pairs)
    held_out: list[Problem] = []
    while len(held_out) < NUM_HELD_OUT:
        held_out += _both_orders(pairs.pop())
    train = [problem for pair in pairs for problem in _both_orders(pair)]
    random.Random(_SPLIT_SEED + 1).shuffle(train)
    return train, held_out[:NUM_HELD_OUT]


def _both_orders(pair: Problem) -> list[Problem]:
    a, b = pair
    return [(a, b)] if a == b else [(a, b), (b, a)]


def question(problem: Problem) -> str:
    """Return the prompt, such as `37+48=?`."""
    return f"{problem[0]}+{problem[1]}=?"


def direct_answer(problem: Problem) -> str:
    r"""Return the direct answer, such as `\boxed{85}`."""
    return rf"\boxed{{{sum(problem)}}}"


def worked_answer(problem: Problem) -> str:
    r"""Return the answer worked digit by digit with the carry, such as `7+8=15 3+4+1=8 \boxed{85}`."""
    (a_tens, a_ones), (b_tens, b_ones) = (divmod(operand, 10) for operand in problem)
    ones = a_ones + b_ones
    carry = ones // 10
    return f"{a_ones}+{b_ones}={ones} {a_tens}+{b_tens}+{carry}={a_tens + b_tens + carry} {direct_answer(problem)}"


def rl_rows(problems: Iterable[Problem], input_key: str, label_key: str) -> list[dict[str, Any]]:
    """Return rows of `--prompt-data`: the question and the sum, as text."""
    return [{input_key: question(problem), label_key: str(sum(problem))} for problem in problems]


def warmup_rows(train: list[Problem], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows (`messages`) of the two warm-up phases, drawn from the training problems."""
    rng = random.Random(seed)
    worked = [_conversation(p, worked_answer(p)) for p in rng.sample(train, NUM_WORKED)]
    mixed = [
        _conversation(p, direct_answer(p) if rng.random() < DIRECT_SHARE else worked_answer(p))
        for p in rng.sample(train, NUM_MIXED)
    ]
    return worked, mixed


def _conversation(problem: Problem, answer: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question(problem)}, {"role": "assistant", "content": answer}],
    }
