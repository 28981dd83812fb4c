"""`slime sft`: supervised fine-tuning through the same loop, without an engine."""

from __future__ import annotations


def run(argv: list[str]) -> int:
    """Fine-tune on rows with answers."""
    from slime_core.cli.train import report
    from slime_core.config import load_settings
    from slime_core.launch import run as launch

    settings = load_settings(argv, command="sft")
    report(launch(settings), settings.args)
    return 0
