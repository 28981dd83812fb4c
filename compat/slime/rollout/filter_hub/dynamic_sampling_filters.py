"""`slime.rollout.filter_hub.dynamic_sampling_filters`: the plugins `nonzero_std` and `nonzero_std_with_fallback`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from slime import _missing
from slime_core.sample import DynamicFilterOutput, Sample


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ. A group of one is kept, where THUDM/slime drops it (its deviation is NaN)."""
    return _filtered("nonzero_std", args, samples)


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """The same, but a dropped group stays when the rollout would otherwise lack one."""
    return _filtered("nonzero_std_with_fallback", args, samples)


def _filtered(name: str, args: Any, samples: list[Sample]) -> DynamicFilterOutput:
    module = _missing.plugin(f"slime_filters.{name}", f"{__name__}.check_reward_{name}")
    whole = args if hasattr(args, "plugins") else SimpleNamespace(**vars(args), plugins={})
    decision: DynamicFilterOutput = module.dynamic_filter(whole, samples)
    return decision


__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]
__getattr__ = _missing.names(__name__)
