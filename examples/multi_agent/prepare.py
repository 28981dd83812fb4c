r"""Inputs of `examples/multi_agent/run.yaml`: sums of two-digit numbers, and a model for two roles.

The planner's prompt is `37+48=?`; it writes the steps (`7+8=15 3+4+1=8`) or `skip`. The solver's prompt is
`37+48=? 7+8=15 3+4+1=8`, and its response is `\boxed{85}`. After the warm-up the planner mostly skips, so the solver
has to guess. Reinforcement learning must discover that both roles get higher rewards when the planner writes the steps.
"""

from __future__ import annotations

import random
from typing import Any

from slime_commands.init import task
from slime_commands.init.warmup import PHASES, Recipe, make_missing_model, write_missing

RECIPE = Recipe("planner_and_solver")
NUM_HELD_OUT = 200
NUM_PLANS, NUM_ANSWERS = 6500, 2500
"""Numbers of examples in the first warm-up phase: a planner that writes the steps, and a solver with a plan."""
NUM_MIXED = 1500
"""Number of examples in the second phase, each of the planner or the solver."""
SKIP_SHARE = 0.85
"""Share of the second phase's examples in which the planner skips, or the solver has no plan."""


def prepare(args: Any) -> None:
    """Write `--prompt-data`, the files of `--eval-prompt-data`, and `--hf-checkpoint` if they are missing."""
    train, held_out = task.split_problems()
    if args.prompt_data:
        write_missing(args.prompt_data, rows(train))
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, rows(held_out[:NUM_HELD_OUT]))
    make_missing_model(args, RECIPE, dict(zip(PHASES, warmup(train, args.seed), strict=True)))


def rows(problems: list[task.Problem]) -> list[dict[str, Any]]:
    """Return rows of chat messages, from which the roles' prompts are made."""
    return [
        {"input": [{"role": "user", "content": task.question(problem)}], "label": str(sum(problem))}
        for problem in problems
    ]


def plan(problem: task.Problem) -> str:
    return task.worked_answer(problem).rpartition(" ")[0]


def warmup(train: list[task.Problem], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the conversations of the two phases."""
    rng = random.Random(seed)
    first = [_planner(problem, plan(problem)) for problem in rng.sample(train, NUM_PLANS)]
    first += [_solver(problem, plan(problem)) for problem in rng.sample(train, NUM_ANSWERS)]
    rng.shuffle(first)
    second = []
    for problem in rng.sample(train, NUM_MIXED):
        made = "skip" if rng.random() < SKIP_SHARE else plan(problem)
        second.append(rng.choice((_planner, _solver))(problem, made))
    return first, second


def _planner(problem: task.Problem, made: str) -> dict[str, Any]:
    return _conversation(task.question(problem), made)


def _solver(problem: task.Problem, made: str) -> dict[str, Any]:
    return _conversation(f"{task.question(problem)} {made}", task.direct_answer(problem))


def _conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
