"""A reward plugin's function `reward`, called with texts: what the graders of this package are."""

from __future__ import annotations

import copy
from typing import Any

from slime import _missing
from slime_core.sample import Sample


def scored(module: str, name: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    """Return the score of `slime_rewards.<name>.reward` for a response and its label."""
    plugin = _missing.plugin(f"slime_rewards.{name}", module)
    return plugin.reward(None, Sample(response=response, label=label, metadata=copy.deepcopy(metadata or {})))
