"""`slime.observability.metric_utils`: `slime.utils.metric_utils` under its newer name."""

from __future__ import annotations

from slime import _missing
from slime.utils.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)

__all__ = ["compute_pass_rate", "compute_rollout_step", "compute_statistics", "dict_add_prefix", "has_repetition"]
__getattr__ = _missing.names(__name__)
