"""Compare shadow rewards and filters with the run's own: agreement, rank correlation, cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_runs.files import FOLDER, Row
from slime_runs.index import Key
from slime_runs.run import Run

_NEWEST = 50
"""Number of rollouts that a summary covers."""
SAME = 1e-6
"""Largest difference at which two rewards agree."""


def rollouts(run: Run) -> list[int]:
    """Return the ids of the rollouts that have shadow results."""
    names = sorted((run.path / FOLDER).glob("shadow_*.jsonl.zst"))
    return [int(path.name.partition("_")[2].partition(".")[0]) for path in names]


def differs(row: Row) -> bool:
    """Return whether a shadow's reward or decision differs from the run's."""
    paid, kept = row.get("score"), row["kept"]
    return any(not _same(paid, value) for value in row["rewards"].values()) or any(
        keeps is not None and keeps != kept for keeps in row["filters"].values()
    )


def disagreements(run: Run) -> set[tuple[int, Key]]:
    """Return (rollout, `Entry.key`) of the samples on which a shadow differs."""
    return {(n, key) for n in rollouts(run) for key, row in run.shadow(n).items() if differs(row)}


def newest_disagreements(run: Run, count: int) -> list[tuple[int, Key, Row]]:
    """Return (rollout, `Entry.key`, row) of the newest `count` samples on which a shadow differs.

    Looks at as many rollouts as `summary`.
    """
    newest = (
        (n, key, row) for n in reversed(rollouts(run)[-_NEWEST:]) for key, row in run.shadow(n).items() if differs(row)
    )  # fmt: skip
    return list(itertools.islice(newest, count))


def in_words(row: Row, number: Any) -> str:
    """Return a line of text with the results of a sample's shadows."""
    paid = [f"{spec} pays {number(value)}" for spec, value in row["rewards"].items()]
    decided = [f"{spec} {'keeps' if keeps else 'drops'} the group" for spec, keeps in row["filters"].items()]
    return "shadow: " + ", ".join([*paid, *decided])


def summary(run: Run) -> dict[str, dict[str, Any]]:
    """Map each spec to "samples" or "groups", "agree" (share) and, for rewards, "rank_correlation", "seconds" each."""
    rewards: dict[str, list[tuple[float, float, float]]] = {}
    filters: dict[str, list[bool]] = {}
    for rollout in rollouts(run)[-_NEWEST:]:
        groups = {}
        for row in run.shadow(rollout).values():
            groups[row["group_index"]] = row
            for spec, value in row["rewards"].items():
                if value is not None and row["score"] is not None:
                    rewards.setdefault(spec, []).append((row["score"], value, row["seconds"][spec]))
        for row in groups.values():
            for spec, keeps in row["filters"].items():
                if keeps is not None:
                    filters.setdefault(spec, []).append(keeps == row["kept"])
    found: dict[str, dict[str, Any]] = {}
    for spec, rows in rewards.items():
        own, other, seconds = zip(*rows)
        same = sum(map(_same, own, other))
        found[spec] = {
            "samples": len(rows),
            "agree": same / len(rows),
            "rank_correlation": rank_correlation(own, other),
            "seconds": sum(seconds) / len(rows),
        }
    return found | {spec: {"groups": len(same), "agree": sum(same) / len(same)} for spec, same in filters.items()}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None if all values of one side are equal."""
    ranks = _ranks(first), _ranks(second)
    return float(np.corrcoef(*ranks)[0, 1]) if all(map(np.ptp, ranks)) else None


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: np.ndarray[Any, Any] = np.cumsum(counts) - (counts - 1) / 2
    return mean_ranks[places]


def _same(paid: float | None, value: float | None) -> bool:
    return paid is None or value is None or abs(paid - value) <= SAME
