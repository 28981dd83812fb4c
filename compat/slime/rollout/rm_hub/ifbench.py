"""`slime.rollout.rm_hub.ifbench`: the reward `ifbench` as a function of texts.

Nothing is cloned or installed at import, as in THUDM/slime; the checks are the plugin's own.
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.rollout.rm_hub._scored import scored


def compute_ifbench_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 when every instruction of `metadata` (or the label) is followed, else 0.0.

    Raises:
        ValueError: An instruction is unknown.
        ImportError: The plugin is not installed.
    """
    return float(scored(f"{__name__}.compute_ifbench_reward", "ifbench", response, label, metadata))


__all__ = ["compute_ifbench_reward"]
__getattr__ = _missing.names(__name__)
