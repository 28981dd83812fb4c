"""Which weights of a run are still on disk: the model that it began with, and its commits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slime_core.checkpoint.run_dir import CHECKPOINTS
from slime_core.checkpoint.store import STATE, CheckpointStore, verify
from slime_core.protocols import Args
from slime_runs.files import read_object
from slime_runs.run import RunError


class Weights(NamedTuple):
    """Weights that a run had at some time."""

    step: int
    """Finished rollouts that they were trained on."""
    version: int
    """Under which the engine served them."""
    path: Path
    """A directory in Hugging Face layout."""


def kept_weights(args: Args) -> Mapping[int, Weights]:
    """By step, in order, of commits that say so; those of the beginning are the model's that the settings name."""
    begun = Path(str(args.hf_checkpoint))
    found = {}
    if (begun / "config.json").is_file() and not args.load:
        found[0] = Weights(0, args.update_weight_start_version + 1, begun)
    for path in CheckpointStore(Path(str(args.save or args.run_dir)) / CHECKPOINTS).commits():
        if state := read_object(path / STATE):
            step = int(state["rollout_id"]) + 1
            found[step] = Weights(step, int(state["weight_version"]), path)
    return found


def weights_at(args: Args, *, step: int | None, version: int | None) -> Weights:
    """The weights after `step` rollouts, or else those served as `version`, verified.

    Raises:
        RunError: They were not kept; says which were, and the flags that keep them.
        CheckpointError: The commit is torn.
    """
    kept = kept_weights(args)
    if step is None and version == args.update_weight_start_version and 0 in kept:
        return kept[0]._replace(version=version)  # of a run that does not train, nothing is sent to the engine
    chosen = [w for w in kept.values() if (w.step == step if step is not None else w.version == version)]
    if not chosen:
        wanted = f"after {step} rollouts" if step is not None else f"of version {version}, which sampled it,"
        there = ", ".join(map(str, kept)) or "none"
        raise RunError(
            f"the weights {wanted} were not kept. Kept are those after so many rollouts: {there}; choose with"
            " --weights STEP. A run keeps more with --save-interval 1, and all of them without --keep-checkpoints"
        )
    if chosen[0].step:
        verify(chosen[0].path)
    return chosen[0]
