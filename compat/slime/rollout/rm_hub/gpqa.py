"""`slime.rollout.rm_hub.gpqa`: the reward `gpqa` as a function of texts."""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.rollout.rm_hub._scored import scored

DEFAULT_VALID_LETTERS = list("ABCDEFGHIJ")
"""Letters of the choices where neither `valid_letters` nor `choices` of the metadata say."""


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when the chosen letter is the correct one, else 0.0; `metadata` may hold choices. Raises ImportError."""
    if response is None:
        return 0.0
    return float(scored(f"{__name__}.compute_gpqa_reward", "gpqa", response, label, metadata))


__all__ = ["DEFAULT_VALID_LETTERS", "compute_gpqa_reward"]
__getattr__ = _missing.names(__name__)
