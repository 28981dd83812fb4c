"""`slime train` (train): reinforcement learning, by rollouts, rewards and optimizer steps."""

from __future__ import annotations

from typing import Any

from slime_core.protocols import Args, Command
from slime_core.waits import telling_start, waiting


def run(argv: list[str]) -> int:
    """Train; the last printed lines name the results and the change of the held-out score."""
    with telling_start():
        with loading():
            from slime_core.launch import run as launch
            from slime_core.plugins.presets import load_settings

            settings = load_settings(argv, command="train")
        summary = launch(settings)
    report(summary, settings.args)
    return 0


def loading() -> waiting:
    """Return the waiting message for the first phase of a command."""
    return waiting("loading code and settings", deadline=None, then="as long as it takes")


def report(summary: dict[str, Any], args: Args) -> None:
    """Print the closing lines of a run; print nothing on ranks other than 0."""
    if not summary:
        return
    print(f"{summary['rollouts']} rollouts in {summary['wall_seconds']:.1f} s; results in {args.run_dir}")
    if summary["drained"]:
        from slime_core.launch.resume import how_to_go_on

        print(f"ended early: {how_to_go_on(args, summary['rollouts'], committed=bool(summary['checkpoint']))}")
    if summary["checkpoint"]:
        print(f"checkpoint {summary['checkpoint']}")
    for score in [*summary["evals"].values()][:1]:
        wide = [f"+-{1.96 * score[key]:.2f}" for key in ("before-stderr", "after-stderr") if key in score]
        print(f"held-out accuracy {score['before']:.2f} -> {score['after']:.2f}", end="")
        print(f" (95%: {', '.join(wide)})" if wide[1:] else "", flush=True)  # a single prompt has none


command = Command(run)
