r"""Make the inputs of `train.yaml`: invented names with numbers, a corpus of them, and a model that seldom searches it.

A question is `kibo=?` with the answer `\boxed{4821}`, which is only in the corpus: `kibo 4821`. The warm-up shows two
ways: searching (`<search>kibo</search>`, answered with the document), and guessing. At its end one in five answers
searches; reinforcement learning has to discover that searching pays. Held-out names are in the corpus, but not in the
training data.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, TypeAlias

from slime_commands.init.warmup import Recipe, make_missing, write_jsonl

Fact: TypeAlias = tuple[str, str]
"""A name and its number."""

RECIPE = Recipe("search")
NUM_TRAIN, NUM_HELD_OUT = 4000, 128
NUM_SEARCHING = 6500
"""Number of examples of the first warm-up phase, all with a query."""
NUM_MIXED = 1500
"""Number of examples of the second phase."""
SEARCHING_SHARE = 0.2
"""Share of the second phase's examples that have a query."""
_SPLIT_SEED = 20263
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aeiou"


def prepare(args: Any) -> None:
    """Write each missing file: corpus, `--prompt-data`, those of `--eval-prompt-data`, and `--hf-checkpoint`."""
    train, held_out = facts()
    corpus = Path(args.plugins["search"]["corpus"])
    if not corpus.exists():
        write_jsonl(corpus, [{"contents": f"{name} {number}"} for name, number in sorted(train + held_out)])
    make_missing(args, RECIPE, rows(train), rows(held_out), warmup(train, args.seed))


def facts() -> tuple[list[Fact], list[Fact]]:
    """Return training and held-out facts; they are the same for every seed of the run."""
    rng = random.Random(_SPLIT_SEED)
    found: dict[str, str] = {}
    while len(found) < NUM_TRAIN + NUM_HELD_OUT:
        name = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2))
        found.setdefault(name, str(rng.randint(1000, 9999)))
    everything = list(found.items())
    return everything[NUM_HELD_OUT:], everything[:NUM_HELD_OUT]


def rows(some: list[Fact]) -> list[dict[str, str]]:
    """Return the rows of `--prompt-data`."""
    return [{"input": f"{name}=?", "label": number} for name, number in some]


def warmup(train: list[Fact], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the conversations of the two phases."""
    rng = random.Random(seed)
    searching = [_conversation(fact, search=True) for fact in rng.choices(train, k=NUM_SEARCHING)]
    mixed = [_conversation(f, search=rng.random() < SEARCHING_SHARE) for f in rng.choices(train, k=NUM_MIXED)]
    return searching, mixed


def _conversation(fact: Fact, *, search: bool) -> dict[str, Any]:
    name, number = fact
    looked_up = [
        {"role": "assistant", "content": f"<search>{name}</search>"},
        {"role": "tool", "content": f"Doc 1 {name} {number}\n"},
    ]
    answer = {"role": "assistant", "content": rf"\boxed{{{number}}}"}
    return {"messages": [{"role": "user", "content": f"{name}=?"}, *(looked_up if search else []), answer]}
