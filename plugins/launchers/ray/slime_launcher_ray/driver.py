"""A run on a cluster that this process has joined: checks, placement, actors, the loop over stand-ins, the end.

`launcher.train` calls `run_on_cluster` in the driver. A placement that cannot be met ends the run before any actor
exists, and other code on a node before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.launch.drive import RunParts, begin_run_dir, drive
from slime_core.launch.prepare import Prepared
from slime_core.launch.resume import commit_to_resume, first_rollout
from slime_launcher_ray.actors import Actors
from slime_launcher_ray.carried import Carried
from slime_launcher_ray.placing import plan, reserve
from slime_launcher_ray.recovery import Recovery
from slime_launcher_ray.remote_stages import (
    RemoteLearner,
    RemoteRollout,
    RemoteTrainers,
    RemoteWeights,
)
from slime_launcher_ray.wait import TrainerDied


def run_on_cluster(run: Prepared, carried: Carried | None, started: float) -> dict[str, Any]:
    """The run; returns the summary.

    Args:
        run: Settings and components, in whose place the driver has stand-ins.
        carried: Files that Ray brings to the nodes.
        started: `time.perf_counter()` at the start of the command.

    Raises:
        ConfigError: The cluster has no place for the run, or other code.
        SlimeError: What a stage raises, wherever it lives.
    """
    args = run.args
    commit = commit_to_resume(args)
    placement = plan(run)
    print(placement.describe(), flush=True)
    reserved = reserve(placement, f"slime {run_dir_of(args).name}", args.ray_placement_timeout)
    try:
        begin_run_dir(run, commit)
        actors = Actors.create(run, placement, reserved, carried)
        try:
            actors.assemble(run, placement, reserved, first_rollout(args, commit), tell_groups=wants_groups(run))
            return _with_actors(run, actors, commit, started, partial(actors.replace_ranks, run, placement, reserved))
        finally:
            actors.close()
    finally:
        reserved.close()


def _with_actors(
    run: Prepared, actors: Actors, commit: Path | None, started: float, replace_ranks: Callable[[int], None]
) -> dict[str, Any]:
    trainers = RemoteTrainers(actors.ranks)
    told = wants_groups(run)
    rollout = RemoteRollout(actors.rollout, run.hooks, tells_groups=told, ahead=run.args.async_training)
    weights = RemoteWeights(actors.ranks, lambda v: run.hooks.slime_weights_updated(weight_version=v))
    learner = RemoteLearner(actors.ranks)
    parts = RunParts(trainers, rollout, rollout, learner, weights)
    if limit := run.args.max_trainer_restarts:
        parts.survives = (TrainerDied,)
        parts.recover = Recovery(limit, actors, rollout, learner, weights, replace_ranks).recover
    return drive(run, parts, commit, started)


def wants_groups(run: Prepared) -> bool:
    """Whether a hook looks at the samples of a rollout, which then come to the driver."""
    return bool(run.hooks.implemented("slime_rollout_end"))
