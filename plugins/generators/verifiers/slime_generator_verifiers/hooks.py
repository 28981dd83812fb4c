"""Rewards and metrics of verifiers -> `verifiers/reward/NAME` and `verifiers/metric/NAME` of a rollout.

A hook plugin, told of every rollout; one without episodes of verifiers gets nothing. What a reader would get wrong: the
means are over samples, and an episode of several trajectories counts with each.
"""

from __future__ import annotations

from collections import defaultdict

from slime_core import Group, hookimpl


@hookimpl
def slime_rollout_end(rollout_id: int, groups: list[Group], metrics: dict[str, float]) -> None:
    """Add the means."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in (sample for group in groups for sample in group):
        notes = sample.metadata.get("verifiers")
        if not isinstance(notes, dict):
            continue
        for kind in ("reward", "metric"):
            for name, value in (notes.get(f"{kind}s") or {}).items():
                if value is not None:
                    found[f"verifiers/{kind}/{name}"].append(float(value))
    metrics.update({name: sum(values) / len(values) for name, values in found.items()})
