"""Generate without training: for `slime rollout` and `slime train --debug-rollout-only`, in this process.

`slime_core.launch.run` finds `train_without_training` by the entry-point group `slime.api`. The run directory of a
command that trains nothing is never one with a training run's records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import CHECKPOINTS, cut_after, run_dir_of
from slime_core.checkpoint.run_dir import FILE as METRICS
from slime_core.config import Settings
from slime_core.errors import ConfigError
from slime_core.launch.drive import rollouts_of, run_hooks
from slime_core.launch.journal import Journal
from slime_core.launch.launchers import AUTO, INLINE, SETTINGS
from slime_core.launch.lock import open_run_dir, sole_writer
from slime_core.launch.prepare import Prepared, prepare
from slime_core.launch.ranks import is_leader
from slime_core.loop import is_due
from slime_core.models.hf_io import copy_assets
from slime_core.protocols import Args
from slime_core.rollout.stage import RolloutStage
from slime_core.sample import Group
from slime_core.waits import published

logger = logging.getLogger(__name__)

Take = Callable[[RolloutStage, int, list[Group], dict[str, float]], None]
"""(stage, rollout_id, groups, metrics): what to do with one finished rollout."""


@contextmanager
def own_directory(args: Args, command: str) -> Iterator[None]:
    """Hold the run directory for a command, and publish its waits there.

    Raises:
        ConfigError: It holds a training run, or another process writes there.
    """
    run_dir = run_dir_of(args)
    of_training = [name for name in (METRICS, CHECKPOINTS) if (run_dir / name).exists()]
    if of_training:
        raise ConfigError(
            f"{run_dir} holds a training run ({', '.join(of_training)}), and slime {command} writes nothing into one;"
            " choose another --run-dir"
        )
    with sole_writer(args), published(args, command):
        yield


def warn_inline_only(settings: Settings, what: str) -> None:
    """Warn of settings of other launchers, which `what` ignores because it does everything in this process."""
    args = settings.args
    asked = ["launcher"] if settings.is_given("launcher") and args.launcher not in (AUTO, INLINE) else []
    asked += [name for name in SETTINGS if getattr(args, name)]
    if asked:
        shown = ", ".join(settings.cite(name) for name in asked)
        logger.warning("%s: without effect with %s, which does everything in this process", shown, what)


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
    warn_inline_only(settings, settings.cite("debug_rollout_only"))
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
