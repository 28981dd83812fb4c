"""`slime train`: reinforcement learning, by rollouts, rewards and optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.protocols import Args, Command
from slime_core.waits import telling_start, waiting


def run(argv: list[str]) -> int:
    """Train; the last lines say where the results are and what the held-out score did."""
    with telling_start():
        with loading():
            from slime_core.launch import run as launch
            from slime_core.plugins.presets import load_settings

            settings = load_settings(argv, command="train")
        summary = launch(settings)
    report(summary, settings.args)
    return 0


def loading() -> waiting:
    """What a command does first."""
    return waiting("loading code and settings", deadline=None, then="as long as it takes")


def report(summary: dict[str, Any], args: Args) -> None:
    """The closing lines of a run; nothing on ranks other than 0."""
    if not summary:
        return
    print(f"{summary['rollouts']} rollouts in {summary['wall_seconds']:.1f} s; results in {args.run_dir}")
    if summary["drained"]:
        print(_how_to_go_on(summary, args))
    if summary["checkpoint"]:
        print(f"checkpoint {summary['checkpoint']}")
    if summary["eval_before"] is not None:
        print(f"held-out accuracy {summary['eval_before']:.2f} -> {summary['eval_after']:.2f}", flush=True)


def _how_to_go_on(summary: dict[str, Any], args: Args) -> str:
    """For a run that a signal ended early."""
    done = f"ended early: {summary['rollouts']} of {args.num_rollout} rollouts done"
    own = args.load and Path(args.load).resolve() in {Path(p).resolve() for p in (args.save, args.run_dir) if p}
    if not summary["checkpoint"]:
        again = "the same command" if own else "the same command with --overwrite"
        return f"{done}, so there is nothing to keep yet; {again} starts again"
    if own:
        return f"{done} and committed; the same command goes on from there"
    return f"{done} and committed; the same command with --load {args.save or args.run_dir} goes on from there"


command = Command(run)
