"""slime's changes to the SGLang servers that it launches on CPU; SGLang calls `register` in each server process."""

from __future__ import annotations


def register() -> None:
    """Apply the changes for CPU."""
    from slime_sglang_plugin import cpu

    cpu.apply()
