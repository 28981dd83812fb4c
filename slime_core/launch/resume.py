"""Find the commit that `--load` names, restore every stage from it, and print the result."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.checkpoint.run_dir import CONFIG, OUTPUT, check_run_dir, run_dir_of
from slime_core.checkpoint.sources import looked_for, required_source, source_in
from slime_core.checkpoint.store import find, is_checkpoint, read_state
from slime_core.config import Settings
from slime_core.errors import CheckpointError, rollout_name
from slime_core.launch.journal import Journal
from slime_core.protocols import Args

logger = logging.getLogger(__name__)

_PLACES = {"load", "save", "run_dir", "config", "overwrite", "prepare_path", "start_rollout_id", "num_rollout"}
"""Settings whose change between a run and its continuation is not reported."""


def commit_to_resume(args: Args) -> Path | None:
    """Return the commit (or HF directory) that `--load` names; print a line and return None for a fresh start.

    Raises:
        CheckpointError: The commit is torn or foreign, or a directory that this run does not write to has no commit.
    """
    commit = named_commit(args)
    if args.load and commit is None:
        print(f"no checkpoint in {args.load} yet: starting from {args.hf_checkpoint}", flush=True)
    return commit


def named_commit(args: Args) -> Path | None:
    """Do as `commit_to_resume` without printing."""
    if not args.load:
        return _initial(args)
    if not is_checkpoint(args.load) and (source := source_in(Path(args.load))) is not None:
        if args.ckpt_step is not None:
            raise CheckpointError(f"--ckpt-step {args.ckpt_step}: --load {args.load} is {source}, which has no steps")
        args.finetune = True  # THUDM/slime's `--load` of an HF directory loads only its weights
        return Path(args.load)
    commit = find(args.load, args.ckpt_step)
    if commit is None and (not _loads_own(args) or args.ckpt_step is not None):
        raise CheckpointError(f"--load {args.load}: no slime checkpoint there. {looked_for(args.load)}")
    return _initial(args) if commit is None else commit


def how_to_go_on(args: Args, rollouts: int, *, committed: bool) -> str:
    """Return the advice for a run that ended early, with `rollouts` rollouts done: the command that resumes it."""
    done, own = f"{rollouts} of {args.num_rollout} rollouts done", _loads_own(args)
    if not committed:
        way = "" if own else " with --overwrite"
        return f"{done}, so there is nothing to keep yet; the same command{way} starts again"
    way = "" if own else f" with --load {args.save or args.run_dir}"
    return f"{done} and committed; the same command{way} goes on from there"


def _loads_own(args: Args) -> bool:
    return args.load is not None and Path(args.load).resolve() in _own_places(args)


def _own_places(args: Args) -> set[Path]:
    """Return the directories that this run writes to."""
    return {Path(place).resolve() for place in (args.save, args.run_dir) if place}


def _initial(args: Args) -> Path | None:
    """Return the directory of `--initial-megatron-checkpoint` and load only its weights; None without the flag."""
    if not args.initial_megatron_checkpoint:
        return None
    args.finetune = True
    return required_source(args.initial_megatron_checkpoint, None, cite="--initial-megatron-checkpoint").directory


def goes_on(settings: Settings, commit: Path | None) -> bool:
    """Return True if the records in the run directory belong to this run and are continued.

    They do if `--load` names a commit in the same run, or if the same command ran there and ended before its first
    commit (a scheduler restarts it). Records of other settings without a commit to resume from belong to another run.
    """
    args = settings.args
    if not args.load:
        return False
    if commit is not None and not _own_places(args).isdisjoint(commit.resolve().parents):
        return True
    config, own = run_dir_of(args) / CONFIG, settings.to_yaml(directory=os.getcwd())
    if not config.is_file():  # killed while its processes started: only their output exists
        used = check_run_dir(args, resume=True)
        return {path.name for path in used} <= {*OUTPUT}
    return _given(config.read_text(encoding="utf-8", errors="replace")) == _given(own)


def _given(config: str) -> list[str]:
    """Return the lines of a `config.yaml` without origins, derived values, and settings that may differ."""
    lines = [line.rpartition("  # ")[0] for line in config.splitlines() if not line.startswith("#")]
    return [line for line in lines if line.partition(":")[0] not in _PLACES]


def first_rollout(args: Args, commit: Path | None) -> int:
    """Return the number of the first rollout to run."""
    if commit is None or args.finetune:
        return args.start_rollout_id or 0
    return int(read_state(commit)["rollout_id"]) + 1


def unfinished_evaluations(commit: Path) -> list[int]:
    """Return the steps whose evaluation the commit's run did not finish; they run first, with the commit's weights."""
    return [int(step) for step in read_state(commit).get("unfinished_evaluations", ())]


def restore(
    args: Args,
    commit: Path,
    settings: Mapping[str, object],
    *,
    trainer: Any,
    stage: Any,
    weights: Any,
    journal: Journal,
) -> None:
    """Restore every stage to the state of the commit. Raises CheckpointError if the commit does not fit this run."""
    trainer.load(commit)
    if args.finetune:
        print(f"weights of {commit}, {source_in(commit)}; everything else starts over (--finetune)", flush=True)
        return
    state = read_state(commit)
    start = first_rollout(args, commit)
    open_groups = stage.load(commit, start - 1)
    # The loop's first push serves the restored weights, under the version they had.
    weights.version = state["weight_version"] - 1
    journal.restore(commit, state)
    # Last, because this deletes records after the commit, and a refused resume must delete nothing.
    if commit.parent.resolve() == journal.store.root.resolve():
        journal.store.rewind(commit, keep=args.keep_checkpoints, spared=journal.best())
    changed = _changes(state["settings"], settings)
    note = f"; changed settings: {', '.join(changed)}" if changed else ""
    print(
        f"resumed from {commit}: {start} of {args.num_rollout} rollouts done, continuing with {rollout_name(start)};"
        f" {_taken(args)} restored; {open_groups}{note}",
        flush=True,
    )
    _warn_about_plugins(state["plugins"], journal.plugins)


def _taken(args: Args) -> str:
    """Return the parts of a commit that a resumed run loads, as text."""
    left_out = {"optimizer": args.no_load_optim, "RNG": args.no_load_rng}
    taken = ["weights", "optimizer", "data cursor", "buffer", "RNG"]
    names = [name for name in taken if not left_out.get(name)]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    keys = (then.keys() | now.keys()) - _PLACES
    return [f"{k} {then.get(k)!r} -> {now.get(k)!r}" for k in sorted(keys) if then.get(k) != now.get(k)]


def _warn_about_plugins(then: Sequence[Mapping[str, object]], now: Sequence[Mapping[str, object]]) -> None:
    """Log a warning for each difference between the plugins of the checkpoint's run and those of this run."""
    before, after = {(p["kind"], p["name"]): p for p in then}, {(p["kind"], p["name"]): p for p in now}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if new is None:
            logger.warning("%s %r was part of the run that made the checkpoint and is not part of this one", *key)
        elif old is None:
            logger.warning("%s %r is part of this run and was not part of the one that made the checkpoint", *key)
        elif changes := _plugin_changes(old, new):
            logger.warning("%s %r is not the code that the checkpoint was made with: %s", *key, ", ".join(changes))


def _plugin_changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    names = ("distribution", "version")
    found = [f"{name} {old[name] or 'none'} -> {new[name] or 'none'}" for name in names if old[name] != new[name]]
    if old["sha256"] != new["sha256"]:
        hashes = (str(p["sha256"] or "none")[:12] for p in (old, new))
        found.append(f"source hash {' -> '.join(hashes)} ({new['source_file']})")
    return found
