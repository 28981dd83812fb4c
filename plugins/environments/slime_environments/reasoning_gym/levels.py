"""The package's own curriculum of a task (`reasoning_gym.coaching`): the level of items follows recent success.

The data source uses it with `plugins.reasoning_gym.curriculum`. The level changes only between rollouts, and depends
only on scores of the current level, in any order. So a run and the same run resumed draw the same items, whichever
group finishes first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_environments.reasoning_gym.tasks import TaskRows, dataset_of


class LevelRows(TaskRows):
    """`TaskRows` at one level of the task's curriculum; the metadata of each row has the level."""

    def __init__(
        self, spec: Mapping[str, Any], columns: Mapping[str, str], system_prompt: str | None, level: int
    ) -> None:
        """Create rows as `TaskRows` does; `level` is the initial level, from 0. Raises ConfigError."""
        self.specs = level_specs(spec)
        """The spec of every level."""
        last = len(self.specs) - 1
        if not 0 <= level <= last:
            raise ConfigError(
                f"plugins.reasoning_gym.level {level}: the curriculum of {spec['name']!r} has 0 to {last}"
            )
        super().__init__(self.specs[level], columns, system_prompt)
        self.identity = {"curriculum": self.specs}
        self.level = level

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        row[self._columns["metadata"]]["reasoning_gym"]["level"] = self.level
        return row

    def go_to(self, level: int) -> None:
        """Generate items at this level from now on."""
        self.level, self.spec = level, self.specs[level]
        self._dataset = dataset_of(json.dumps(self.spec, sort_keys=True))


class Curriculum:
    """Sets the level of the next rollout's items from the scores of recent groups."""

    def __init__(self, rows: LevelRows, window: int, raise_at: float, lower_at: float) -> None:
        """Start with the level of `rows`.

        Args:
            rows: Rows whose level changes.
            window: Number of groups to score at a level before it changes.
            raise_at: The level rises by one at a mean score of at least this.
            lower_at: The level falls by one at a mean score below this.
        """
        self._rows, self._window, self._raise_at, self._lower_at = rows, window, raise_at, lower_at
        self._scores: list[float] = []

    @property
    def level(self) -> int:
        """Level of the generated items."""
        return self._rows.level

    def observe(self, level: int | None, score: float) -> None:
        """Record the mean score of a group of this level; scores of other levels than the current one are ignored."""
        if level == self._rows.level:
            self._scores.append(score)

    def move(self) -> None:
        """Change the level if enough scores were recorded; call it between two rollouts."""
        if len(self._scores) < self._window:
            return
        mean, level = math.fsum(self._scores) / len(self._scores), self._rows.level
        step = int(mean >= self._raise_at) - int(mean < self._lower_at)
        self._scores = []
        self._rows.go_to(min(max(level + step, 0), len(self._rows.specs) - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"level": self._rows.level, "scores": sorted(self._scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the output of `state_dict`."""
        self._rows.go_to(int(state["level"]))
        self._scores = [float(score) for score in state["scores"]]


def level_specs(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the spec of each level of the task's curriculum, which overrides its own attributes in `config`.

    Raises:
        ConfigError: The task has no curriculum, or it refuses the curriculum's settings at some level.
    """
    dataset_of(json.dumps(spec, sort_keys=True))  # check the task and `config` alone, for their own error messages
    from reasoning_gym.coaching.attributes import RangeAttributeDefinition
    from reasoning_gym.factory import CURRICULA, create_curriculum

    name = spec["name"]
    if name not in CURRICULA:
        raise ConfigError(f"plugins.reasoning_gym.curriculum: the package has none for the task {name!r}")
    curriculum, specs = create_curriculum(name), []
    attributes = curriculum.attributes.values()
    for level in range(max(len(attribute.levels) for attribute in attributes)):
        curriculum.set_global_level(level)
        made, config = curriculum.generate_configuration(), dict(spec["config"])
        for attribute in attributes:
            is_range = isinstance(attribute, RangeAttributeDefinition)
            fields = ("lower_field_name", "upper_field_name") if is_range else ("field_name",)
            config.update({getattr(attribute, field): getattr(made, getattr(attribute, field)) for field in fields})
        specs.append(json.loads(json.dumps({"name": name, "config": config})))
        try:
            dataset_of(json.dumps(specs[-1], sort_keys=True))
        except ConfigError as error:
            raise ConfigError(f"plugins.reasoning_gym.curriculum: level {level}: {error}") from error
    return specs
