"""The package's own curriculum of a task (`reasoning_gym.coaching`): items at a level that moves with recent success.

The data source uses it with `plugins.reasoning_gym.curriculum`. The level moves between rollouts only, and looks at
scores of its own level alone, in no order; so whatever finishes first, a run and the same run resumed draw the same
items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_environment_reasoning_gym.tasks import TaskRows, dataset_of


class LevelRows(TaskRows):
    """`TaskRows` at one level of the task's curriculum; rows say which in their metadata."""

    def __init__(
        self, spec: Mapping[str, Any], columns: Mapping[str, str], system_prompt: str | None, level: int
    ) -> None:
        """As `TaskRows`; `level` is the first, from 0. Raises ConfigError."""
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
        """Make items at this level from now on."""
        self.level, self.spec = level, self.specs[level]
        self._dataset = dataset_of(json.dumps(self.spec, sort_keys=True))


class Curriculum:
    """Scores of recent groups -> the level of the next rollout's items."""

    def __init__(self, rows: LevelRows, window: int, raise_at: float, lower_at: float) -> None:
        """
        Args:
            rows: What moves.
            window: Groups that are scored at a level before it moves.
            raise_at: Mean score from which on it goes up by one.
            lower_at: Mean score below which it goes down by one.
        """
        self._rows, self._window, self._raise_at, self._lower_at = rows, window, raise_at, lower_at
        self._scores: list[float] = []

    @property
    def level(self) -> int:
        """Of the items that are made."""
        return self._rows.level

    def observe(self, level: int | None, score: float) -> None:
        """The mean score of one group, of whose level this is."""
        if level == self._rows.level:
            self._scores.append(score)

    def move(self) -> None:
        """Look at what has come together, between two rollouts."""
        if len(self._scores) < self._window:
            return
        mean, level = math.fsum(self._scores) / len(self._scores), self._rows.level
        step = int(mean >= self._raise_at) - int(mean < self._lower_at)
        self._scores = []
        self._rows.go_to(min(max(level + step, 0), len(self._rows.specs) - 1))

    def state_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"level": self._rows.level, "scores": sorted(self._scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._rows.go_to(int(state["level"]))
        self._scores = [float(score) for score in state["scores"]]


def level_specs(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The spec of each level of the task's curriculum, which sets what it knows of in `config`.

    Raises:
        ConfigError: The task has no curriculum, or one whose settings the task itself refuses at some level.
    """
    dataset_of(json.dumps(spec, sort_keys=True))  # the task and `config` by themselves, with their own messages
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
