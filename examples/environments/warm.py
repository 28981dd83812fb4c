"""The recipe of this example: walks to take, and a tiny model that has seen careless walkers.

`--prepare-path warm.py` makes what is missing. The warm-up's walkers look at three signs in ten and toss a die at the
others, and so does the model that they leave; the rest is left to reinforcement learning.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slime_command_init.warmup import Recipe, make_missing_model, write_missing

RECIPE = Recipe("signs")
PROMPT = "walk"
SIGNS, MOVES = "^>v<", "nesw"
CROSSINGS = 4
NUM_HELD_OUT = 64
"""Of the 256 walks, those that are evaluated and never trained on."""
NUM_CARELESS = 2000
"""Walks of the warm-up."""
LOOKING = 0.3
"""Share of its signs that are looked at."""
PHASES = (Path(__file__).with_name("warmup.yaml"),)
_SPLIT_SEED = 7


def prepare(args: Any) -> None:
    """Make `args.prompt_data`, the evaluation file and `args.hf_checkpoint` where they are missing."""
    walks = [[a, b, c, d] for a in SIGNS for b in SIGNS for c in SIGNS for d in SIGNS]
    random.Random(_SPLIT_SEED).shuffle(walks)
    if args.prompt_data:
        write_missing(args.prompt_data, rows(walks[NUM_HELD_OUT:]))
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, rows(walks[:NUM_HELD_OUT]))
    make_missing_model(args, RECIPE, {PHASES[0]: careless(args.seed)})


def rows(walks: list[list[str]]) -> list[dict[str, Any]]:
    """Data rows: the same prompt for all, and the signs for the environment."""
    prompt = [{"role": "system", "content": PROMPT}]
    return [{"prompt": prompt, "metadata": {"signs": "".join(walk)}} for walk in walks]


def careless(seed: int) -> list[dict[str, Any]]:
    """Conversations of walkers who mostly toss a die."""
    rng = random.Random(seed)
    return [{"messages": _walk(rng)} for _ in range(NUM_CARELESS)]


def _walk(rng: random.Random) -> list[dict[str, str]]:
    said = [{"role": "system", "content": PROMPT}]
    for _ in range(CROSSINGS):
        sign = rng.choice(SIGNS)
        move = MOVES[SIGNS.index(sign)] if rng.random() < LOOKING else rng.choice(MOVES)
        said += [{"role": "user", "content": sign}, {"role": "assistant", "content": move}]
    return said
