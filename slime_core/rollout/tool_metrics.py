"""`metadata["tool_stats"]` of samples -> `tools/...` metrics, one set per tool. Pure functions.

Generators that call tools write {tool: {"calls", "errors", "seconds"}} there, and further sums of their own, such as
`code_sandbox`'s "waited". What a reader would get wrong: `calls` is per execution (fan-out siblings share one), also of
those that called nothing; every other sum is per call.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from slime_core.fan_out import shares
from slime_core.types import Sample

STATS = "tool_stats"
_NAMES = {"errors": "error_ratio"}
"""Sum -> the metric's name where it is another."""


def tool_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`tools/<tool>/{calls,error_ratio,seconds,...}`; nothing where no sample called a tool.

    What is no finite number, or belongs to a tool without calls, is left out: a user's generator writes this, too.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0.0, "errors": 0.0, "seconds": 0.0})
    weights = shares(samples)
    for sample, weight in zip(samples, weights):
        stats = sample.metadata.get(STATS)
        for tool, counts in stats.items() if isinstance(stats, Mapping) else ():
            for name, value in counts.items() if isinstance(counts, Mapping) else ():
                if isinstance(value, int | float) and math.isfinite(value):
                    sums[tool][name] = sums[tool].get(name, 0.0) + weight * value
    metrics: dict[str, float] = {}
    for tool, found in sorted(sums.items()):
        calls = found.pop("calls")
        if calls > 0:
            metrics[f"tools/{tool}/calls"] = calls / sum(weights)
            metrics |= {f"tools/{tool}/{_NAMES.get(name, name)}": value / calls for name, value in found.items()}
    return metrics
