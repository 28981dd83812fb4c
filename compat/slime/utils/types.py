"""`slime.utils.types`: the sample and what travels with it, which are slime_core's."""

from __future__ import annotations

from typing import Any, TypeAlias

from slime import _missing
from slime_core.sample import Sample, SampleStatus

RolloutBatch: TypeAlias = dict[str, Any]
"""A trainer's dictionary of per-sample lists (`slime_core.sample.TrainBatch.to_rollout_data` makes one)."""

Status = SampleStatus
"""`Sample.Status`."""

__all__ = ["RolloutBatch", "Sample", "Status"]
__getattr__ = _missing.names(__name__)
