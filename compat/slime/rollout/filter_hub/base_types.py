"""`slime.rollout.filter_hub.base_types`: a dynamic filter's answer (slime_core's) and what calls and counts filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from slime import _missing
from slime_core.sample import DynamicFilterOutput


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The filter's answer, a bare bool wrapped; without a filter everything is kept."""
    answer = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return answer if hasattr(answer, "keep") else DynamicFilterOutput(keep=bool(answer))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether a group goes: not kept, and not needed either (`keep_when_insufficient`).

    Args:
        output: The filter's answer.
        remaining_batch_size: Groups submitted and not dropped so far, this one included.
        target_data_size: Groups that the rollout needs.
    """
    needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not (output.keep or needed)


class MetricGatherer:
    """Counts dropped groups by reason, for rollout functions that filter by themselves."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group; one without a reason is in no metric."""
        if reason is not None:
            self._drops[reason] += 1

    def collect(self) -> dict[str, int]:
        """`rollout/dynamic_filter/drop_<reason>`, the name that slime_core's own filter stage counts under."""
        return {f"rollout/dynamic_filter/drop_{reason}": number for reason, number in self._drops.items()}


__all__ = ["DynamicFilterOutput", "MetricGatherer", "call_dynamic_filter", "should_drop_dynamic_filter_output"]
__getattr__ = _missing.names(__name__)
