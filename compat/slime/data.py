"""`slime.data`: samples, and data sources without groups (`slime_data.flat_source`).

The base classes define the default behaviour, and subclasses override it. The classes of `slime.rollout.data_source`
are different: they return groups and are built from `args` alone.
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.utils.data import Dataset, read_file
from slime_core.sample import Sample


class RolloutDataSource:
    """A source of the prompts of `dataset` in the run's order; it does not use generated samples again."""

    def __init__(self, dataset: Any, args: Any) -> None:
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        """Return a sample for each of the next `num_samples` prompts."""
        return [Sample(prompt=prompt) for prompt in self.dataset.sample(num_samples)]

    def add_samples(self, samples: list[Sample]) -> None:
        """Receive the samples that a rollout trains on; does nothing by default."""


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A source that keeps generated samples in the list `buffer`; `buffer_filter` chooses samples to train on again."""

    def __init__(self, dataset: Any, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Sample] = []

    def add_samples(self, samples: list[Sample]) -> None:
        """Add the samples to the buffer."""
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: list[Sample], num_samples: int) -> list[Sample]:
        """Return the oldest samples, at most `num_samples`; each brings its whole group."""
        return buffer[:num_samples]


__all__ = ["Dataset", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample", "read_file"]
__getattr__ = _missing.names(__name__)
