"""`slime sft` (train): supervised fine-tuning.

The same loop, with the rollout function `sft` (`rollout.py`), which asks no engine.
"""

from __future__ import annotations

from slime_core.cli.train import loading, report
from slime_core.protocols import Command
from slime_core.waits import telling_start


def run(argv: list[str]) -> int:
    """Fine-tune on rows with answers."""
    with telling_start():
        with loading():
            from slime_core.config import load_settings
            from slime_core.launch import run as launch

            settings = load_settings(argv, command="sft")
        summary = launch(settings)
    report(summary, settings.args)
    return 0


command = Command(run)
