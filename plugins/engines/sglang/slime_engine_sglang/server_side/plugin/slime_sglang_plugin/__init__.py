"""What slime adds to the SGLang servers that it launches on CPU; SGLang calls `register` in each of their processes."""

from __future__ import annotations


def register() -> None:
    """Apply it."""
    from slime_sglang_plugin import cpu

    cpu.apply()
