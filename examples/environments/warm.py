"""The recipe of this example: data of walks, and a tiny model trained on careless walks.

`--prepare-path warm.py` makes missing files. In the warm-up, walkers read three signs in ten and choose a random
direction at the others. The resulting model does the same; reinforcement learning improves it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slime_commands.init.warmup import Recipe, make_missing_model, write_missing

RECIPE = Recipe("signs")
PROMPT = "walk"
SIGNS, MOVES = "^>v<", "nesw"
CROSSINGS = 4
NUM_HELD_OUT = 64
"""Number of the 256 walks that are used for evaluation only."""
NUM_CARELESS = 2000
"""Number of walks in the warm-up."""
LOOKING = 0.3
"""Share of the signs that a careless walk looks at."""
PHASES = (Path(__file__).with_name("warmup.yaml"),)
_SPLIT_SEED = 7


def prepare(args: Any) -> None:
    """Make `args.prompt_data`, the evaluation file and `args.hf_checkpoint` if they are missing."""
    walks = [[a, b, c, d] for a in SIGNS for b in SIGNS for c in SIGNS for d in SIGNS]
    random.Random(_SPLIT_SEED).shuffle(walks)
    if args.prompt_data:
        write_missing(args.prompt_data, rows(walks[NUM_HELD_OUT:]))
    for path in (args.eval_prompt_data or [])[1::2]:
        write_missing(path, rows(walks[:NUM_HELD_OUT]))
    make_missing_model(args, RECIPE, {PHASES[0]: careless(args.seed)})


def rows(walks: list[list[str]]) -> list[dict[str, Any]]:
    """Return data rows: the same prompt for all, and the signs for the environment."""
    prompt = [{"role": "system", "content": PROMPT}]
    return [{"prompt": prompt, "metadata": {"signs": "".join(walk)}} for walk in walks]


def careless(seed: int) -> list[dict[str, Any]]:
    """Return conversations of walkers who mostly choose a random direction."""
    rng = random.Random(seed)
    return [{"messages": _walk(rng)} for _ in range(NUM_CARELESS)]


def _walk(rng: random.Random) -> list[dict[str, str]]:
    said = [{"role": "system", "content": PROMPT}]
    for _ in range(CROSSINGS):
        sign = rng.choice(SIGNS)
        move = MOVES[SIGNS.index(sign)] if rng.random() < LOOKING else rng.choice(MOVES)
        said += [{"role": "user", "content": sign}, {"role": "assistant", "content": move}]
    return said
