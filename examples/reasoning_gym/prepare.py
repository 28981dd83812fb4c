"""Inputs of `train.yaml`: held-out words to spell backward, and a tiny model that mostly repeats them as they are.

The task is `spell_backward` of the package reasoning-gym, with short words; its data source makes training items as
they are drawn. The warm-up shows two kinds of answers, the word backward and the word as it is, and ends with one in
five backward. Reinforcement learning has to discover from the verifier's scores which answer is right. The warm-up has
no held-out word, but training items differ only by their seed, so a held-out word may be among them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from slime_commands.init.warmup import PHASES, Recipe, make_missing_model
from slime_environments.reasoning_gym import Options
from slime_environments.reasoning_gym import prepare as write_held_out
from slime_environments.reasoning_gym.tasks import TaskRows

from slime_core import options

RECIPE = Recipe("spell_backward")
NUM_BACKWARD = 4480
"""Examples of the first warm-up phase, all backward."""
NUM_MIXED = 992
"""Examples of the second phase."""
BACKWARD_SHARE = 0.2
"""Share of the second phase's examples that answer backward."""
_WARMUP_SEED = 2_000_003


def prepare(args: Any) -> None:
    """Write the missing files of `--eval-prompt-data` and `--hf-checkpoint`."""
    write_held_out(args)
    held_out = {row["label"] for path in (args.eval_prompt_data or [])[1::2] for row in _read(Path(path))}
    make_missing_model(args, RECIPE, dict(zip(PHASES, warmup(args, held_out), strict=True)))


def warmup(args: Any, held_out: set[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return conversations of the two phases, without the answers in `held_out`."""
    own, rng = options(args, "reasoning_gym", Options), random.Random(args.seed)
    config = {**own.config, "seed": _WARMUP_SEED + args.seed, "size": 2 * (NUM_BACKWARD + NUM_MIXED)}
    columns = {"input": "question", "label": "answer", "metadata": "metadata"}
    items = TaskRows({"name": own.task, "config": config}, columns, None)
    rows = [row for row in (items[n] for n in range(len(items))) if row["answer"] not in held_out]
    backward = [_said(row, row["answer"]) for row in rows[:NUM_BACKWARD]]
    mixed = [
        _said(row, row["answer"] if rng.random() < BACKWARD_SHARE else row["answer"][::-1])
        for row in rows[NUM_BACKWARD : NUM_BACKWARD + NUM_MIXED]
    ]
    return backward, mixed


def _said(row: dict[str, Any], answer: str) -> dict[str, Any]:
    said = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
    return {"messages": said}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
