"""The Ray launcher: settings -> a finished run whose stages live in actors.

The driver does what the inline launcher's rank 0 does, checks, run directory, resume, loop, journal, hooks, over
stand-ins for the stages; `launch.drive.drive` is the same for both, and so are the commits. Nothing of
the cluster is touched before every setting has been resolved and tried.

A run on a cluster that this process has joined: checks, placement, actors, the loop over stand-ins, the end.

`launcher.train` calls `run_on_cluster` in the driver. A placement that cannot be met ends the run before any actor
exists, and other code on a node before any model is loaded.

Recover from a dead trainer actor: new ranks from the last commit, while rollout, rewards and engines keep running.

`launch.drive.drive` calls `Recovery.recover` after a `TrainerDied`, and runs the loop again::

    rollout actor: abandon     generation, evaluation and weight transfer end; the engine keeps running
    old ranks: killed          live ranks wait in collective calls with the dead rank
    new ranks: build           in the same places, with the same checks as at the start
    restarts.rewind            trainer, data, ledger, metrics and commits as at the commit; the loop begins with a push

The rank may have died during a weight update, so the engines may serve any mix of weights until the first push. Nothing
is generated before the push.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from slime_runs.events import EventLog

from slime_core.checkpoint.run_dir import run_dir_of
from slime_core.checkpoint.store import read_state
from slime_core.config import Settings
from slime_core.launch.drive import RunParts, begin_run_dir, drive
from slime_core.launch.journal import Journal
from slime_core.launch.lock import sole_writer
from slime_core.launch.prepare import Prepared, prepare, run_preflight
from slime_core.launch.resume import commit_to_resume, first_rollout
from slime_core.waits import published
from slime_launcher_ray.actors import Actors
from slime_launcher_ray.carried import Carried, carrying
from slime_launcher_ray.placing import plan, reserve
from slime_launcher_ray.remote_stages import (
    RemoteLearner,
    RemoteRollout,
    RemoteTrainers,
    RemoteWeights,
)
from slime_launcher_ray.restarts import Restarts, rewind
from slime_launcher_ray.session import connected, joins_another
from slime_launcher_ray.wait import CONTROL, TrainerDied


def train(settings: Settings) -> dict[str, Any]:
    """`slime train` and `slime sft` on a Ray cluster: returns the summary.

    Raises:
        ConfigError: A setting is wrong, or the cluster cannot be joined, has no place for the run, or has other code.
        SlimeError: What a stage raises, wherever it lives.
    """
    started, args = time.perf_counter(), settings.args
    run = prepare(settings)
    if args.preflight:
        run_preflight(run)
    with (
        sole_writer(args),
        published(args, "driver"),
        carrying(args, joins_another(args)) as (carried, package),
        connected(args, package),
    ):
        return run_on_cluster(run, carried, started)


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


class Recovery:
    """Restarts of one run's trainer.

    Args:
        limit: `--max-trainer-restarts`.
        actors: The actors of the run.
        stage: Proxy of the rollout stage; `learner` and `weights` are the proxies of the trainer's ranks.
        replace_ranks: Creates new ranks that continue with the given rollout.
    """

    def __init__(
        self,
        limit: int,
        actors: Actors,
        stage: RemoteRollout,
        learner: RemoteLearner,
        weights: RemoteWeights,
        replace_ranks: Callable[[int], None],
    ) -> None:
        self._limit = limit
        self._actors = actors
        self._stage, self._learner, self._weights = stage, learner, weights
        self._replace_ranks = replace_ranks
        self._restarts: Restarts | None = None

    def recover(self, error: Exception, journal: Journal) -> int:
        """Restore the run to its last commit, with a new trainer, and return the rollout to continue with.

        Raises:
            TrainError: Recovery failed; the message has the reason and the end of the dead actor's log.
            SlimeError: Rollout or engine have failed too.
        """
        if self._restarts is None:
            self._restarts = Restarts(self._limit, journal.store, EventLog(journal.run_dir))
        while True:
            restart = self._restarts.after(error, self._learner.rollout_id)
            print(f"slime: {_first_line(error)}; {restart}", file=sys.stderr, flush=True)
            restart.pause(threading.Event())
            try:
                # Kill the ranks first: a live rank may be in a weight update, which the rollout actor then ends.
                self._actors.end_ranks()
                self._actors.rollout.call("abandon", group=CONTROL)
                self._replace_ranks(_first(restart.commit))
                trainers = RemoteTrainers(self._actors.ranks)
                return rewind(restart, trainer=trainers, stage=self._stage, weights=self._weights, journal=journal)
            except TrainerDied as another:
                error = another


def _first(commit: Path) -> int:
    return int(read_state(commit)["rollout_id"]) + 1


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(":;")
