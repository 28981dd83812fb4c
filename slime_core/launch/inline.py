"""The inline launcher: every stage in this process (with several trainer processes, in rank 0's); pdb works.

`train` resolves, prepares, builds, resumes, runs the loop and cleans up, in that order; whatever is wrong with the
settings ends it before a model is loaded. What every launcher does with the parts it built is in `launch/drive.py`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slime_core.checkpoint.run_dir import cut_after, run_dir_of
from slime_core.config import Settings
from slime_core.config.schema import Given
from slime_core.errors import ConfigError
from slime_core.launch import drain
from slime_core.launch.drive import RunParts, begin_run_dir, build_learner, build_weights, drive, rollouts_of, run_hooks
from slime_core.launch.journal import Journal
from slime_core.launch.lock import open_run_dir, sole_writer
from slime_core.launch.prepare import Prepared, prepare, run_preflight
from slime_core.launch.ranks import is_leader, is_rank, num_processes, report, rollouts_told, start_ranks
from slime_core.launch.resume import commit_to_resume, named_commit
from slime_core.launch.roles import Follower, Leader, LedTrainers, Trainers
from slime_core.loop import is_due
from slime_core.models.hf_io import copy_assets
from slime_core.rollout.stage import RolloutStage
from slime_core.sample import Group
from slime_core.waits import first_results, published, waiting
from slime_core.weights.collective import FollowingWeights


def train(settings: Settings) -> dict[str, Any]:
    """`slime train` and `slime sft`: returns the summary (empty on ranks that another process started or leads)."""
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


def _train(run: Prepared, commit: Path | None, started: float) -> dict[str, Any]:
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
) -> dict[str, Any]:
    weights = build_weights(run, trainers, stage, lambda v: run.hooks.slime_weights_updated(weight_version=v))
    rollout: Any = stage
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


def _follow(run: Prepared, trainers: Trainers) -> dict[str, Any]:
    """A process other than rank 0: what rank 0 says, with nothing recorded."""
    with drain.outliving():
        Follower(trainers, build_learner(run, trainers), FollowingWeights(run.args, trainers.actor)).run()
    return {}


Take = Callable[[RolloutStage, int, list[Group], dict[str, float]], None]
"""(stage, rollout_id, groups, metrics): what to do with one finished rollout."""


def generate(run: Prepared, take: Take, before: Callable[[RolloutStage], None] | None = None) -> None:
    """Do `--num-rollout` rollouts from `--start-rollout-id` on.

    Args:
        run: Settings and components; the engine starts here and is stopped on every way out.
        take: Called after each rollout.
        before: Called once the engine serves.
    """
    args = run.args
    stage = run.rollout_stage()
    stage.ledger.recording = False  # no commit will ask what became of the groups
    try:
        span = _span(run, stage)
        stage.start()
        if args.dump_details:
            copy_assets(args.hf_checkpoint, Path(args.dump_details) / "tokenizer")
        if before is not None:
            before(stage)
        for rollout_id in range(*span):
            take(stage, rollout_id, *stage.generate_groups(rollout_id))
    finally:
        stage.stop()


def _span(run: Prepared, stage: RolloutStage) -> tuple[int, int]:
    """Return the first rollout and the end: `--num-rollout` many for `slime rollout`, else up to that number."""
    args = run.args
    first = args.start_rollout_id or 0
    if args.num_rollout is None:
        args.num_rollout = rollouts_of(args, stage.parts.data_source)
    return first, first + args.num_rollout if run.settings.command == "rollout" else args.num_rollout


def train_without_training(settings: Settings) -> dict[str, Any]:
    """Generate, score, log and save samples for `slime train --debug-rollout-only`; return the summary of the run.

    No trainer is built and no checkpoint written. Under torchrun rank 0 does it all, and the others return at once.
    """
    if not is_leader():
        return {}
    started, args = time.perf_counter(), settings.args
    run_dir = run_dir_of(args)
    run = prepare(settings, learn=False)
    with sole_writer(args), published(args, "rollout"):
        open_run_dir(args, resume=False)
        journal = Journal(args, run_dir, run.hooks, [], dict, run.plugins, started)

        def before(stage: RolloutStage) -> None:
            if args.eval_interval and not args.skip_eval_before_train:
                journal.log(0, stage.evaluate(0))

        def take(stage: RolloutStage, rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
            if is_due(args.eval_interval, rollout_id, args.num_rollout or 0):
                metrics |= stage.evaluate(rollout_id)
            journal.log(rollout_id + 1, metrics)

        with run_hooks(run, run_dir):
            cut_after(run_dir, args.start_rollout_id or 0)
            generate(run, take, before)
        return journal.finish(settings.command, args.num_rollout or 0, None)
