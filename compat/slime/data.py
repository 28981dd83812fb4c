"""`slime.data`: samples, and the data sources that know no groups (`slime_core.data.flat_source`).

The base classes are what such a source does by default; a subclass overrides what it wants otherwise. Those of
`slime.rollout.data_source`, which hand over groups and are built from `args` alone, are others.
"""

from __future__ import annotations

from typing import Any

from slime import _missing
from slime.utils.data import Dataset, read_file
from slime_core.sample import Sample


class RolloutDataSource:
    """Prompts of `dataset` in the run's order; what was generated is not used again."""

    def __init__(self, dataset: Any, args: Any) -> None:
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        """One sample for each of the next `num_samples` prompts."""
        return [Sample(prompt=prompt) for prompt in self.dataset.sample(num_samples)]

    def add_samples(self, samples: list[Sample]) -> None:
        """Told of the samples that a rollout trains on."""


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Keeps what was generated in the list `buffer`; `buffer_filter` chooses what is trained on once more."""

    def __init__(self, dataset: Any, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Sample] = []

    def add_samples(self, samples: list[Sample]) -> None:
        """Keep them."""
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: list[Sample], num_samples: int) -> list[Sample]:
        """The oldest ones, at most `num_samples`; each brings its whole group."""
        return buffer[:num_samples]


__all__ = ["Dataset", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample", "read_file"]
__getattr__ = _missing.names(__name__)
