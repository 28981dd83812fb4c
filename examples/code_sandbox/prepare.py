r"""Inputs of `train.yaml`: products and sums of three-digit numbers, and a model that seldom lets code compute them.

A problem is `123*456=?`, to be answered `\boxed{56088}`. The warm-up shows two ways: code (`<code>123*456</code>`,
which the sandbox runs, and answers `56088`), and answering directly, which a tiny model cannot learn. It ends with one
in five writing code; reinforcement learning has to find out that code pays.
"""

from __future__ import annotations

from typing import Any

from slime_commands.init import calculator
from slime_commands.init.calculator import Problem
from slime_commands.init.warmup import Recipe, make_missing

RECIPE = Recipe("code_sandbox")
NUM_TRAIN, NUM_HELD_OUT = 4000, 128
_SPLIT_SEED = 20262


def prepare(args: Any) -> None:
    """Write what is missing of `--prompt-data`, the files of `--eval-prompt-data`, and `--hf-checkpoint`."""
    train, held_out = problems()
    make_missing(args, RECIPE, calculator.rows(train), calculator.rows(held_out), warmup(train, args.seed))


def problems() -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems; always the same, whatever the run's seed."""
    return calculator.drawn(NUM_TRAIN, NUM_HELD_OUT, _SPLIT_SEED)


def warmup(train: list[Problem], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Conversations of the two phases: with code in all, and in one of five."""
    return calculator.warmup(train, seed, "<code>{}</code>")
