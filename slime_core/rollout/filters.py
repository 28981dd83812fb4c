"""Stage 5: scored group -> keep or drop, with counted reasons (dynamic sampling)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from slime_core.admission import Sealed
from slime_core.errors import RolloutError
from slime_core.protocols import Args, EditTraits, traits_of
from slime_core.types import FilterDecision, Group
from slime_core.workers.call import user_code


class FilterStage:
    """Applies the dynamic filter, if there is one, and counts why groups are dropped, or kept all the same."""

    def __init__(self, args: Args, function: Callable[..., Any] | None, name: str = "") -> None:
        self.args = args
        self._function = function
        self._name = name
        self._edits = function is not None and traits_of(function, EditTraits, name).edits_samples
        self._drops: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def decide(self, group: Group) -> FilterDecision:
        """The filter's decision.

        Raises:
            PluginError: The filter raises, or changes what a sample is trained on without declaring that it edits.
            RolloutError: It answers nonsense.
        """
        if self._function is None:
            return FilterDecision(keep=True)
        label = f"--dynamic-sampling-filter-path {self._name!r} (group {group[0].group_index})"
        sealed = Sealed(() if self._edits else group)
        with user_code(label):
            answer = self._function(self.args, group)
        sealed.check(label)
        if not hasattr(answer, "keep"):
            answer = answer.item() if hasattr(answer, "item") else answer  # numpy's and torch's bool
            if not isinstance(answer, bool):
                raise RolloutError(
                    f"--dynamic-sampling-filter-path {self._name!r} returned {type(answer).__name__};"
                    " expected a bool or a decision with .keep and .reason"
                )
            answer = FilterDecision(keep=answer)
        keep = bool(answer.keep)
        reason = getattr(answer, "reason", None)
        return FilterDecision(keep, reason, bool(getattr(answer, "keep_when_insufficient", False)))

    def count(self, reason: str) -> None:
        """Count one dropped group."""
        self._drops[reason] += 1

    def count_kept(self, why: str) -> None:
        """Count one group that is trained on although the filter dropped it."""
        self._kept[why] += 1

    def take_metrics(self) -> dict[str, float]:
        """`rollout/dynamic_filter/drop_<reason>` and `kept_<why>` since the last call."""
        metrics = {f"rollout/dynamic_filter/drop_{reason}": float(n) for reason, n in sorted(self._drops.items())}
        metrics |= {f"rollout/dynamic_filter/kept_{why}": float(n) for why, n in sorted(self._kept.items())}
        self._drops.clear()
        self._kept.clear()
        return metrics
