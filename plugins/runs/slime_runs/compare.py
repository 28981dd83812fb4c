"""Compare runs. Runs whose settings differ only in the seed form a group; the spread in the group is the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from slime_runs.overview import CURVES
from slime_runs.run import Run, differences
from slime_runs.scores import data_sets

_SEEDS = ("seed", "rollout_seed")


def compare(runs: Sequence[Run], *, last: int = 10) -> dict[str, Any]:
    """Group the runs, and return the differences between the groups.

    Args:
        runs: The runs; at least one.
        last: Number of rollouts whose mean is compared, up to the last rollout that all runs have reached.

    Returns:
        "groups": names of their runs; "settings" and "plugins": name -> value in each group; "metrics": name ->
        "values", (mean, standard error over seeds or None) in each group, and "differ": True if all groups have two
        runs and two groups are further apart than 1.96 standard errors of their difference; "from" and "until": the
        first and the last compared rollout, counted from 1.
    """
    groups = _groups(runs)
    first = [group[0] for group in groups]
    end = min((max((line["step"] for line in run.metrics()), default=0) for run in runs), default=0)
    scores = data_sets(name for run in runs for line in run.metrics() for name in line)
    names = [*CURVES.values(), *(f"eval/{name}" for name in scores)]
    metrics = {}
    for name in names:
        values = [_values(group, name, end, last) for group in groups]
        if all(values):
            found = [(statistics.fmean(v), _error(v)) for v in values]
            metrics[name] = {"values": found, "differ": _differ(found)}
    return {
        "groups": [[str(run.path) for run in group] for group in groups],
        "settings": {name: row for name, row in differences(first).items() if name not in _SEEDS},
        "plugins": _plugins(first),
        "from": max(0, end - last) + 1,
        "until": end,
        "metrics": metrics,
    }


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if set(differences([group[0], run])) <= set(_SEEDS) and not _plugins([group[0], run]):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _values(group: Sequence[Run], name: str, end: int, last: int) -> list[float]:
    """Return the mean of each run that has the metric."""
    found = [[value for step, value in run.series(name) if end - last < step <= end] for run in group]
    return [statistics.fmean(values) for values in found if values]


def _error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _differ(found: Sequence[tuple[float, float | None]]) -> bool | None:
    if len(found) < 2 or any(error is None for _, error in found):
        return None
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    return any(abs(a[0] - b[0]) > 1.96 * math.hypot(a[1] or 0.0, b[1] or 0.0) for a, b in pairs)


def _plugins(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return kind and name -> version and prefix of the source's digest, for plugins that differ."""
    found = [
        {f"{p['kind']} {p['name']}": f"{p.get('version')} {str(p.get('sha256'))[:8]}" for p in run.plugins()}
        for run in runs
    ]
    names = sorted({name for plugins in found for name in plugins})
    rows = {name: [plugins.get(name, "-") for plugins in found] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}
