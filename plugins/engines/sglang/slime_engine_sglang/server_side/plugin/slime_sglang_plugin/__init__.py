"""What slime adds to the SGLang servers that it launches; SGLang calls `register` in each of their processes."""

from __future__ import annotations


def register() -> None:
    """Apply what this server needs."""
    from slime_sglang_plugin import cpu, weight_action

    cpu.apply()
    weight_action.apply()
