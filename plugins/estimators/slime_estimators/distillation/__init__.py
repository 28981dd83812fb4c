"""Distillation by the distributions of policy and teacher: the loss `distillation`, and how its columns travel.

The loss is in `loss.py`, its formulas in `divergence.py`. What a teacher on a server says of a response arrives in
`Sample.train_metadata`, which this module writes and reads without torch.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from slime_core import Args, PluginOptions, options

__all__ = [
    "TEACHER",
    "TEACHER_PROMPT",
    "TURN_WEIGHTS",
    "Options",
    "number_of_ids",
    "pack_likeliest",
    "unpack_likeliest",
]

TEACHER = "teacher"
"""Key of `train_metadata`: name of the teacher in the trainer that scores the sample."""
TEACHER_PROMPT = "teacher_prompt"
"""Key of `train_metadata`: token ids of the prompt that the trainer's teacher sees instead of the sample's."""
TURN_WEIGHTS = "teacher_turn_weights"
"""Key of `train_metadata`: a weight for each turn of the response."""
_IDS, _LOG_PROBS = "teacher_top_ids", "teacher_top_log_probs"


class Options(PluginOptions):
    """`plugins.distillation.*`"""

    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(policy || teacher), KL(teacher || policy), or the generalised Jensen-Shannon divergence of GKD."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jsd: weight of the teacher in the mixture."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of the teacher's likeliest tokens whose terms are summed; 0: none, the sampled token alone estimates. With
    at least the size of the vocabulary the divergence is exact."""
    tail: Literal["sampled", "bucket", "drop"] = "sampled"
    """All other tokens: estimated by the sampled token without bias, one token together, or left out."""
    coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the divergence in the loss, beside the policy loss."""
    teacher_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the way to the actor's weights that the teacher of `--opd-teacher-load` moves before each rollout is
    trained on."""
    turn_weights: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (1.0,)
    """Weight of the first turn, the second, ...; further turns have the last weight."""
    first_turns: Annotated[int, Field(ge=1)] | None = None
    """Number of turns that are distilled in the first rollout; all when not given."""
    turn_every: Annotated[int, Field(ge=1)] | None = None
    """Rollouts after which one turn more is distilled; never when not given."""

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if self.tail != "sampled" and not self.top_k:
            raise ValueError(f"tail {self.tail} with top_k 0 compares nothing; give top_k, or tail sampled")
        if self.turn_every and self.first_turns is None:
            raise ValueError("turn_every adds turns to first_turns, which is not given")
        if "beta" in self.model_fields_set and self.divergence != "jsd":
            raise ValueError(f"beta has no effect with divergence {self.divergence}; it is for jsd")
        return self


def number_of_ids(args: Args) -> int:
    """Return how many of a teacher's likeliest tokens the run's loss reads; 0 for another loss."""
    return options(args, "distillation", Options).top_k if args.loss_type == "distillation" else 0


def pack_likeliest(rows: Sequence[Sequence[tuple[float, int]] | None], number: int) -> dict[str, str]:
    """Return entries of `train_metadata` for (log-prob, id) pairs per response token; None for a token without them.

    Missing pairs have id -1. The arrays are little-endian, as base64, since a batch travels as JSON.
    """
    ids = np.full((len(rows), number), -1, "<i4")
    log_probs = np.zeros((len(rows), number), "<f4")
    for place, row in enumerate(rows):
        for column, (log_prob, token) in enumerate((row or ())[:number]):
            ids[place, column], log_probs[place, column] = token, log_prob
    return {_IDS: b64encode(ids.tobytes()).decode(), _LOG_PROBS: b64encode(log_probs.tobytes()).decode()}


def unpack_likeliest(given: Mapping[str, Any] | None, length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return ids [length, number], -1 if missing, and log-probs of `pack_likeliest`; None without these entries.

    Raises:
        ValueError: They are not those of `length` tokens.
    """
    if not given or _IDS not in given:
        return None
    columns = [np.frombuffer(b64decode(given[key]), kind) for key, kind in ((_IDS, "<i4"), (_LOG_PROBS, "<f4"))]
    ids, log_probs = (column.reshape(length, -1) for column in columns)
    return ids, log_probs
