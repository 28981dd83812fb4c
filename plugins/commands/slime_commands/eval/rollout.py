"""`slime rollout` (data): generate and score samples without training."""

from __future__ import annotations

import os
from typing import Any

from slime_core.cli.train import loading
from slime_core.errors import rollout_name
from slime_core.protocols import Command
from slime_core.waits import first_results, telling_start


def run(argv: list[str]) -> int:
    """Write one JSONL file per rollout, one sample a line, readable by `Sample.from_dict`."""
    with telling_start():
        return _rollout(argv)


def _rollout(argv: list[str]) -> int:
    with loading():
        from slime_commands.eval.generation import generate, own_directory, warn_inline_only
        from slime_core.checkpoint.run_dir import CONFIG, check_dumps, run_dir_of, write_summary, write_text
        from slime_core.launch.lock import open_run_dir
        from slime_core.launch.prepare import prepare
        from slime_core.plugins.presets import load_settings

        settings = load_settings(argv, command="rollout")
    warn_inline_only(settings, "slime rollout")
    template = str(settings.args.save_debug_rollout_data)

    def report(_: Any, rollout_id: int, groups: list[Any], metrics: dict[str, float]) -> None:
        shown = {"rollout/raw_reward": "reward {:.3f}", "perf/tokens_per_sec": "{:.0f} tokens/s"}
        first_results()
        values = [form.format(metrics[key]) for key, form in shown.items() if key in metrics]
        line = ", ".join([f"{rollout_name(rollout_id)}: {sum(map(len, groups))} samples", *values])
        print(f"{line} -> {template.format(rollout_id=rollout_id)}", flush=True)

    run = prepare(settings, learn=False)
    args, run_dir = run.args, run_dir_of(run.args)
    with own_directory(args, "rollout"):
        if not args.overwrite:
            check_dumps(args)
        open_run_dir(args, resume=bool(args.start_rollout_id))  # more rollouts of the same run
        write_text(run_dir / CONFIG, settings.to_yaml(directory=os.getcwd()))
        generate(run, report)
        write_summary(run_dir, {"command": "rollout", "rollouts": args.num_rollout, "plugins": run.plugins})
    return 0


command = Command(run)
