"""Share of characters of the response that are digits: something a random model learns within a few rollouts.

Settings, from `--set plugins.digits.<name>=...`: `ignore_blanks` (off), to leave blanks out of the count.
"""

from __future__ import annotations

from typing import Any

from slime_core import Sample


def reward(args: Any, sample: Sample) -> float:
    """Digits over characters, in [0, 1]; 0.0 for an empty response."""
    options = (getattr(args, "plugins", None) or {}).get("digits", {})
    text = "".join(sample.response.split()) if options.get("ignore_blanks") else sample.response
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0
