"""`slime.rollout.rm_hub.deepscaler`: the reward `deepscaler` as a function of texts."""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.rollout.rm_hub._scored import scored


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 when the box after the last `</think>` (or `###Response`) equals the label, else 0. Raises ImportError."""
    return int(scored(f"{__name__}.get_deepscaler_rule_based_reward", "deepscaler", response, label))


__all__ = ["get_deepscaler_rule_based_reward"]
__getattr__ = _missing.names(__name__)
