"""A walk over open ground to a place three to five fields away: an environment, its rows, and a model for it.

The observation has the moves that are left, such as `nww`; a wrong move adds one. Only arriving pays, after up to
twelve moves. Where all walks of a group arrive, `grpo` has nothing to compare. `gigpo` compares what followed from the
same observation, and discounts by turn.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slime_commands.init.warmup import Recipe, make_missing_model, write_missing

from slime_core import Sample

MOVES = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
"""Move -> fields to the east and to the north."""
NUM_CARELESS, LOOKING = 2000, 0.3
"""Number of walks in the warm-up, and the share of their moves that are right for sure; the others are random."""


class Environment:
    """A walk. Any other word than a move stays where it is."""

    def reset(self, sample: Sample) -> str:
        """Begin at the row's distance, metadata {"walk": [east, north]}."""
        self.east, self.north = sample.metadata["walk"]
        return self.left()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Move by one field; return the moves that are left, and 1 at the end of the walk."""
        east, north = MOVES.get(action.strip(), (0, 0))
        self.east, self.north = self.east - east, self.north - north
        done = not (self.east or self.north)
        return self.left(), float(done), done

    def left(self) -> str:
        """Return the moves that are left."""
        return "ns"[self.north < 0] * abs(self.north) + "ew"[self.east < 0] * abs(self.east)


def prepare(args: Any) -> None:
    """Make `args.prompt_data` and `args.hf_checkpoint` if they are missing (`--prepare-path`)."""
    if args.prompt_data:
        write_missing(args.prompt_data, rows())
    rng = random.Random(args.seed)
    walks = [{"messages": careless(rng)} for _ in range(NUM_CARELESS)]
    make_missing_model(args, Recipe("walk"), {Path(__file__).with_name("warmup.yaml"): walks})


def rows() -> list[dict[str, Any]]:
    """Return a row for each place that is three to five fields away."""
    away = [(east, north) for east in range(-3, 4) for north in range(-3, 4) if 3 <= abs(east) + abs(north) <= 5]
    return [{"prompt": [{"role": "system", "content": "walk"}], "metadata": {"walk": walk}} for walk in away]


def careless(rng: random.Random) -> list[dict[str, str]]:
    """Return the conversation of a walk of at most six moves, most of them in a random direction."""
    walk, said = Environment(), [{"role": "system", "content": "walk"}]
    seen, done = walk.reset(Sample(metadata=rng.choice(rows())["metadata"])), False
    while not done and len(said) <= 12:
        move = rng.choice(seen if rng.random() < LOOKING else "nesw")
        said += [{"role": "user", "content": seen}, {"role": "assistant", "content": move}]
        seen, _, done = walk.step(move)
    return said
