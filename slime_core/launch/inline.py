"""The inline launcher: every stage in this process (with several trainer processes, in rank 0's); pdb works.

`train` resolves, prepares, builds, resumes, runs the loop and cleans up, in that order; a wrong setting ends it before
a model is loaded. `launch/drive.py` has the steps that every launcher shares.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from slime_core.config import Settings
from slime_core.config.schema import Given
from slime_core.errors import ConfigError
from slime_core.launch import drain
from slime_core.launch.drive import RunParts, begin_run_dir, build_learner, build_weights, drive, rollouts_of
from slime_core.launch.lock import sole_writer
from slime_core.launch.prepare import Prepared, prepare, run_preflight
from slime_core.launch.ranks import is_leader, is_rank, num_processes, report, rollouts_told, start_ranks
from slime_core.launch.resume import commit_to_resume, named_commit
from slime_core.launch.roles import Follower, Leader, LedTrainers, Trainers
from slime_core.rollout.stage import RolloutStage
from slime_core.waits import first_results, published, waiting
from slime_core.weights.collective import FollowingWeights


def train(settings: Settings) -> dict[str, object]:
    """Train, and return the summary: empty on ranks that another process started or leads."""
    started, args = time.perf_counter(), settings.args
    run = prepare(settings)
    if args.preflight and is_leader() and not is_rank():
        run_preflight(run)
    if run.processes > num_processes():
        named_commit(args)
        given: Given = args
        if given.num_rollout is None:
            args.num_rollout = rollouts_of(args, run.parts.build_data_source(args))
        first_results()
        # Each rank tells of its own start, but it takes a second until it can.
        print(f"slime: starting {run.processes} trainer processes", file=sys.stderr, flush=True)
        with published(args, "parent of the ranks"):
            return start_ranks(run)
    with sole_writer(args) if is_leader() else nullcontext(), published(args, f"rank {os.environ.get('RANK', '0')}"):
        summary = _train(run, commit_to_resume(args), started)
    return {} if is_rank() else summary


def _train(run: Prepared, commit: Path | None, started: float) -> dict[str, object]:
    args, stage = run.args, None
    if args.num_rollout is None:
        args.num_rollout = rollouts_told()
    if is_leader():
        begin_run_dir(run, commit)
        with waiting("the data", deadline=None, then="as long as it takes to read"):
            stage = run.rollout_stage()
        if args.num_rollout is None:
            args.num_rollout = rollouts_of(args, stage.parts.data_source)
    elif args.num_rollout is None:
        raise ConfigError("--num-epoch under torchrun: only rank 0 reads the data; set --num-rollout instead")
    with waiting("the trainer and its models", deadline=None, then="as long as it takes to read them"):
        trainers = run.parts.build_trainers(args)
    if stage and trainers.actor.device.type == "cpu":
        threads = torch.get_num_threads()
        print(f"CPU threads: {threads}; only --num-threads {threads} repeats this run bit for bit", flush=True)
    try:
        return _drive(run, trainers, stage, commit, started) if stage else _follow(run, trainers)
    except Exception as error:
        if is_rank():
            report(error)
        raise
    finally:
        trainers.close()


def _drive(
    run: Prepared, trainers: Trainers, stage: RolloutStage, commit: Path | None, started: float
) -> dict[str, object]:
    weights = build_weights(run, trainers, stage, lambda v: run.hooks.slime_weights_updated(weight_version=v))
    rollout: object = stage
    if run.args.async_training:
        from slime_core.rollout.ahead import Ahead

        rollout = Ahead(run.args, stage)
    parts = RunParts(trainers, stage, rollout, build_learner(run, trainers), weights)
    if num_processes() == 1:
        return drive(run, parts, commit, started)
    leader = Leader(trainers.actor, run.args.distributed_timeout_minutes)
    led = LedTrainers(leader, trainers)
    try:
        summary = drive(run, replace(parts, trainers=led, together=leader.together), commit, started)
    except Exception as error:
        if is_rank():
            report(error)
        leader.end(error)
        raise
    leader.end()
    return summary


def _follow(run: Prepared, trainers: Trainers) -> dict[str, object]:
    """Run the calls that rank 0 announces; record nothing."""
    with drain.outliving():
        Follower(trainers, build_learner(run, trainers), FollowingWeights(run.args, trainers.actor)).run()
    return {}
