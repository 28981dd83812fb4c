"""A reward plugin's function `reward`, called with texts: what the graders of this package are."""

from __future__ import annotations

import copy
from typing import Any

from slime import _missing
from slime_core.sample import Sample


def scored(module: str, name: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    """The answer of the function `reward` of plugin `slime-reward-<name>` to a response and its label."""
    package = f"slime_reward_{name}"
    plugin = _missing.plugin(package, f"slime-reward-{name}", module)
    return plugin.reward(None, Sample(response=response, label=label, metadata=copy.deepcopy(metadata or {})))
