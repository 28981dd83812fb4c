"""The objects that a Trainer hands out: a finished step, and a batch that may be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.sample import Group, Sample


@dataclass(frozen=True, repr=False)
class _Rollout:
    number: int
    """Number of the rollout, counted from 1, as on the console."""
    metrics: Mapping[str, float]
    """Metrics by name: of the rollout, and for a step also of the training and of an evaluation after it."""
    groups: list[Group]
    """Groups of samples with their rewards, in the order in which they are trained on."""

    @property
    def id(self) -> int:
        """The rollout's id in files, hooks and settings: the number less one."""
        return self.number - 1

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups."""
        return [sample for group in self.groups for sample in group]

    @property
    def reward(self) -> float:
        """Mean reward of the rollout; NaN if nothing was scored."""
        return float(self.metrics.get("rollout/raw_reward", float("nan")))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(number={self.number}, reward={self.reward:.4g}, samples={len(self.samples)})"

    def _repr_html_(self) -> str:
        from slime_python.html import rollout_html

        return rollout_html(type(self).__name__, self.number, self.metrics, self.samples)


@dataclass(frozen=True, repr=False)
class Step(_Rollout):
    """A rollout that has been trained on."""

    run_dir: Path

    @property
    def advantages(self) -> list[list[float] | float]:
        """Advantages of each sample, one per response token or one for all; empty if the run does not store them."""
        from slime_runs.run import Run

        rows = Run(self.run_dir).trained(self.id)
        return [row["advantages"] for row in rows.values() if "advantages" in row]


@dataclass(frozen=True, repr=False)
class Batch(_Rollout):
    """A generated rollout for `Trainer.update`."""

    data: Any
    """The batch as the optimizer gets it, a `slime_core.TrainBatch`; on a Ray cluster a reference to it."""
