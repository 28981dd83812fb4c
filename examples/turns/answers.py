"""Answers with a reward of two parts, `moves` and `polite`; rows and a model for them.

The question has four signs, such as `^>v<`, and an answer has room for a move each (`nesw`). A polite answer gives the
last place to a dot. The sum of the parts is largest without dots. Normalised apart, as in `gdpo`, both parts count.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from slime_commands.init.warmup import Recipe, make_missing_model, write_missing

from slime_core import Sample

SIGNS, MOVES = "^>v<", "nesw"
NUM_CARELESS, LOOKING, POLITE = 2000, 0.3, 0.4
"""Number of answers in the warm-up, the share of their moves that are right for sure, and that of polite answers."""


def reward(args: Any, sample: Sample) -> dict[str, float]:
    """Return the parts, and their sum as `score` (`--reward-key score`)."""
    said = sample.response.removesuffix("<|end|>").strip()[: len(SIGNS)]
    moves = float(sum(a == b for a, b in zip(said, str(sample.label))))
    polite = 0.2 * said.endswith(".")
    return {"score": moves + polite, "moves": moves, "polite": polite}


def prepare(args: Any) -> None:
    """Make `args.prompt_data` and `args.hf_checkpoint` if they are missing (`--prepare-path`)."""
    if args.prompt_data:
        write_missing(args.prompt_data, rows())
    rng = random.Random(args.seed)
    answers = [{"messages": careless(rng)} for _ in range(NUM_CARELESS)]
    make_missing_model(args, Recipe("answers"), {Path(__file__).with_name("warmup.yaml"): answers})


def rows() -> list[dict[str, Any]]:
    """Return a row for each four signs; the label has their moves."""
    return [
        {
            "prompt": [{"role": "user", "content": "".join(SIGNS[k] for k in numbers)}],
            "label": "".join(MOVES[k] for k in numbers),
        }
        for numbers in itertools.product(range(4), repeat=4)
    ]


def careless(rng: random.Random) -> list[dict[str, str]]:
    """Return a question and an answer of four moves, or of three and a dot."""
    row = rng.choice(rows())
    moves = [right if rng.random() < LOOKING else rng.choice(MOVES) for right in row["label"]]
    if rng.random() < POLITE:
        moves[-1] = "."
    return [*row["prompt"], {"role": "assistant", "content": "".join(moves)}]
