"""Metrics of your own, beside slime's or instead of them.

    slime train --config demo.yaml \
        --custom-rollout-log-function-path examples/hooks/log_functions.py \
        --custom-eval-rollout-log-function-path examples/hooks/log_functions.py \
        --custom-config-path examples/hooks/custom_config.yaml

What either function puts into `extra_metrics` is recorded with the rollout's or evaluation's other metrics. A function
that returns True says that it has logged, and slime's own `rollout/...`, `eval/...` and `perf/...` of that call are
left out; those of training are not.
"""

from __future__ import annotations

from typing import Any

from slime_core import Sample


def log_rollout(
    rollout_id: int, args: Any, samples: list[Sample], extra_metrics: dict[str, float], rollout_time: float
) -> bool:
    """The longest response, in characters."""
    extra_metrics["rollout/longest_text"] = float(max(len(s.response) for s in samples))
    return bool(getattr(args, "only_my_metrics", False))  # from custom_config.yaml


def log_eval(rollout_id: int, args: Any, data: dict[str, dict[str, Any]], extra_metrics: dict[str, float]) -> bool:
    """Per data set, how many answers have a reward above a half."""
    for name, columns in data.items():
        extra_metrics[f"eval/{name}/above_half"] = float(sum(reward > 0.5 for reward in columns["rewards"]))
    return bool(getattr(args, "only_my_metrics", False))
