"""A run on a cluster that this process has joined: checks, placement, actors, the loop over stand-ins, the end.

`launcher.train` calls `conduct` in the driver. What a reader would get wrong: a placement that cannot be met ends the
run before any actor exists, and other code on a node before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.launch.lead import Cast, begin_run_dir, lead
from slime_core.launch.prepare import Prepared
from slime_core.launch.resume import commit_to_resume, first_rollout
from slime_core.observability.run_dir import run_dir_of
from slime_launcher_ray.carried import Carried
from slime_launcher_ray.crew import Crew
from slime_launcher_ray.placing import plan, reserve
from slime_launcher_ray.recovery import Recovery
from slime_launcher_ray.stand_ins import RemoteAsyncRollout, RemoteLearner, RemoteRollout, RemoteTrainers, RemoteWeights
from slime_launcher_ray.wait import TrainerDied


def conduct(run: Prepared, carried: Carried | None, started: float) -> dict[str, Any]:
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
        crew = Crew.create(run, placement, reserved, carried)
        try:
            crew.assemble(run, placement, reserved, first_rollout(args, commit), tell_groups=wants_groups(run))
            return _conduct(run, crew, commit, started, partial(crew.replace_ranks, run, placement, reserved))
        finally:
            crew.close()
    finally:
        reserved.close()


def _conduct(
    run: Prepared, crew: Crew, commit: Path | None, started: float, replace_ranks: Callable[[int], None]
) -> dict[str, Any]:
    trainers = RemoteTrainers(crew.ranks)
    stage = RemoteRollout(crew.rollout, run.hooks, wants_groups(run))
    weights = RemoteWeights(crew.ranks, lambda v: run.hooks.slime_weights_updated(weight_version=v))
    rollout: Any = RemoteAsyncRollout(crew.rollout, stage) if run.args.async_training else stage
    learner = RemoteLearner(crew.ranks)
    cast = Cast(trainers, trainers.save, stage, rollout, learner, weights)
    if limit := run.args.max_trainer_restarts:
        cast.survives = (TrainerDied,)
        cast.recover = Recovery(limit, crew, stage, learner, weights, replace_ranks).recover
    return lead(run, cast, commit, started)


def wants_groups(run: Prepared) -> bool:
    """Whether a hook looks at the samples of a rollout, which then come to the driver."""
    return bool(run.hooks.implemented("slime_rollout_end"))
