"""A directory with a model, in HF's layout or Megatron's -> the parameters of this rank.

`roles.py` calls it for `--hf-checkpoint`, `--ref-load`, `--opd-teacher-load` and `--critic-load`, `checkpoint.py` for a
`--load` that is no commit of this trainer. A commit of this trainer has the weights twice, and those in Megatron's
format are taken: they are in the dtype that was trained, and each rank reads its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_core.checkpoint.sources import find_source
from slime_core.errors import CheckpointError
from slime_trainer_megatron.checkpoints import dist_checkpoint
from slime_trainer_megatron.families.family import MegatronModel
from slime_trainer_megatron.weights.weights_in import load_hf


def load_weights(
    chunks: Sequence[Any],
    model: MegatronModel,
    directory: str | Path,
    *,
    missing_ok: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill the parameters of this rank's chunks. Every rank calls it.

    Args:
        chunks: The model of this rank, one per virtual pipeline stage; wrapped or not.
        model: The family's map; of a critic, `weight_map.critic_of` it.
        directory: With the weights: HF's layout, a directory of `slime convert`, a commit.
        missing_ok: HF names that may be missing or of another shape; their parameters stay as they are.

    Raises:
        CheckpointError: The weights do not fit; on every rank when on one.
        ConfigError: The files cannot be read.
    """
    source = find_source(directory)
    if source is None or source.megatron is None:
        load_hf(chunks, model, directory, missing_ok=missing_ok)
        return
    optional = {row.megatron for row in model.rows if all(missing_ok(name) for name in row.hf)}
    try:
        dist_checkpoint.load_model(chunks, source.megatron, optional=optional)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: the weights do not fit the model of its config.json: {error}") from error
