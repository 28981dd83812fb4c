"""`slime rollout`: generate and score samples without training."""

from __future__ import annotations

from typing import Any

from slime_core.cli.train import loading
from slime_core.protocols import Command
from slime_core.waits import first_results, telling_start


def run(argv: list[str]) -> int:
    """Write one JSONL file per rollout, one sample a line, readable by `Sample.from_dict`."""
    with telling_start():
        return _rollout(argv)


def _rollout(argv: list[str]) -> int:
    with loading():
        from slime_core.launch.launchers import warn_inline_only
        from slime_core.launch.prepare import prepare
        from slime_core.launch.rollout_only import generate
        from slime_core.plugins.presets import load_settings

        settings = load_settings(argv, command="rollout")
    warn_inline_only(settings, "slime rollout")
    template = str(settings.args.save_debug_rollout_data)

    def report(_: Any, rollout_id: int, groups: list[Any], metrics: dict[str, float]) -> None:
        shown = {"rollout/raw_reward": "reward {:.3f}", "perf/tokens_per_sec": "{:.0f} tokens/s"}
        first_results()
        values = [form.format(metrics[key]) for key, form in shown.items() if key in metrics]
        line = ", ".join([f"rollout {rollout_id}: {sum(map(len, groups))} samples", *values])
        print(f"{line} -> {template.format(rollout_id=rollout_id)}", flush=True)

    generate(prepare(settings, learn=False), report)
    return 0


command = Command(run)
