"""The inline launcher: every stage in this process (one per data-parallel rank under torchrun); pdb works.

`train` resolves, prepares, builds, resumes, runs the loop and cleans up, in that order; whatever is wrong with the
settings ends it before a model is loaded. Other launchers build the same `Stages`, with stand-ins for those stages
that live elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from slime_core import loop
from slime_core.config import Settings
from slime_core.data.dumps import check_saved
from slime_core.errors import ConfigError
from slime_core.launch.data_parallel import FollowingJournal, ReceivingRollout, SendingRollout, save_together
from slime_core.launch.journal import Journal
from slime_core.launch.lock import file_lock
from slime_core.launch.preflight import run_preflight
from slime_core.launch.prepare import Prepared, prepare
from slime_core.launch.resume import commit_to_resume, first_rollout, restore
from slime_core.launch.trainers import Trainers
from slime_core.models.hf_io import copy_assets
from slime_core.observability.run_dir import CONFIG, check_run_dir, open_run_dir, run_dir_of, write_text
from slime_core.rollout.stage import RolloutStage
from slime_core.weights.sync import WeightSync


def train(settings: Settings) -> dict[str, Any]:
    """`slime train` and `slime sft`: returns the summary (empty on ranks other than 0)."""
    started, args = time.perf_counter(), settings.args
    run_dir, reuse = run_dir_of(args), {"resume": bool(args.load), "overwrite": args.overwrite}
    if is_leader():
        check_run_dir(run_dir, **reuse)
    run = prepare(settings)
    if args.preflight and is_leader():
        run_preflight(run)
    with sole_writer(run_dir) if is_leader() else nullcontext():
        return _train(run, commit_to_resume(args), run_dir, reuse, started)


def sole_writer(run_dir: Path) -> AbstractContextManager[None]:
    """Two runs in one directory would mix their checkpoints and metrics."""
    return file_lock(run_dir / ".lock", deadline=0.0, refusal=f"{run_dir}: another run is writing here; choose another")


def _train(
    run: Prepared, commit: Path | None, run_dir: Path, reuse: Mapping[str, bool], started: float
) -> dict[str, Any]:
    args, stage = run.args, None
    if is_leader():
        if args.load_debug_rollout_data:
            check_saved(args, first_rollout(args, commit))
        open_run_dir(run_dir, **reuse)
        if args.dump_details:
            copy_assets(args.hf_checkpoint, Path(args.dump_details) / "tokenizer")
        stage = run.rollout_stage()
        if args.num_rollout is None:
            args.num_rollout = rollouts_of(args, stage.parts.data_source)
    elif args.num_rollout is None:
        raise ConfigError("--num-epoch with several trainer processes: set --num-rollout instead")
    trainers = run.parts.build_trainers(args)
    try:
        return _lead(run, trainers, stage, commit, started) if stage else _follow(run, trainers, commit)
    finally:
        trainers.close()


def _lead(
    run: Prepared, trainers: Trainers, stage: RolloutStage, commit: Path | None, started: float
) -> dict[str, Any]:
    args, run_dir = run.args, run_dir_of(run.args)
    weights = WeightSync(
        args,
        trainers.actor,
        stage,
        lambda v: run.hooks.slime_weights_updated(weight_version=v),
        run.parts.weight_post_write,
    )
    journal = Journal(
        args,
        run_dir,
        run.hooks,
        [lambda directory, _: save_together(trainers, directory), stage.save],
        lambda: {"weight_version": weights.version, "settings": run.settings.to_dict()},
        run.plugins,
        started,
    )
    start = args.start_rollout_id = first_rollout(args, commit)
    with told_to_hooks(run, run_dir):
        if commit is not None:
            restore(
                args, commit, run.settings.to_dict(), trainer=trainers, stage=stage, weights=weights, journal=journal
            )
        rollout = SendingRollout(stage, trainers.actor) if trainers.world_size > 1 else stage
        try:
            stage.start()
            loop.train(args, loop.Stages(rollout, _learner(run, trainers), weights, journal), start)
        finally:
            stage.stop()
        return journal.finish(run.settings.command, args.num_rollout, str(commit) if commit else None)


def _follow(run: Prepared, trainers: Trainers, commit: Path | None) -> dict[str, Any]:
    """A data-parallel rank other than 0: same loop, received batches, nothing recorded."""
    args = run.args
    if commit is not None:
        trainers.load(commit)
    rollout = ReceivingRollout(trainers.actor)
    weights = WeightSync(args, trainers.actor, rollout)
    stages = loop.Stages(rollout, _learner(run, trainers), weights, FollowingJournal(trainers))
    loop.train(args, stages, first_rollout(args, commit))
    return {}


def _learner(run: Prepared, trainers: Trainers) -> Any:
    from slime_core.learning.learner import Learner

    estimator = run.parts.build_estimator(run.args)
    loss = run.parts.build_loss(run.args, estimator)
    return Learner(
        run.args,
        trainers.actor,
        estimator,
        loss,
        critic=trainers.critic,
        postprocess=run.parts.data_postprocess,
    )


def rollouts_of(args: Any, source: Any) -> int:
    """`--num-epoch` in rollouts."""
    if not hasattr(source, "__len__"):
        raise ConfigError("--num-epoch needs a data source with a length; set --num-rollout instead")
    rollouts = int(args.num_epoch * (len(source) // args.rollout_batch_size))
    if rollouts == 0:
        raise ConfigError(
            f"--num-epoch {args.num_epoch}: the {len(source)} prompts do not fill one rollout of --rollout-batch-size"
            f" {args.rollout_batch_size}; lower it, or set --num-rollout"
        )
    return rollouts


@contextmanager
def told_to_hooks(run: Prepared, run_dir: Path) -> Iterator[None]:
    """Write `config.yaml`; `slime_run_start` before, `slime_run_end` on every way out."""
    write_text(run_dir / CONFIG, run.settings.to_yaml())
    run.hooks.slime_run_start(args=run.args, run_dir=run_dir)
    try:
        yield
    except BaseException as error:
        run.hooks.slime_run_end(error=error)
        raise
    run.hooks.slime_run_end(error=None)


def is_leader() -> bool:
    """Whether this process is data-parallel rank 0, which rolls out and records."""
    return os.environ.get("RANK", "0") == "0"
