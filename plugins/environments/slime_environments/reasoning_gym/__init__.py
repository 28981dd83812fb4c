"""Tasks of the `reasoning-gym` package: prompts by seed and index, scored by the task's own verifier.

    data source   --data-source-path reasoning_gym    training prompts, made as they are drawn; the cursor is resumed
    reward        --custom-rm-path reasoning_gym      scores rows of the data source or the recipe
    recipe        --prepare-path reasoning_gym        the missing files of --eval-prompt-data, for `slime eval` too
    environment   --environment-path reasoning_gym    several tries at a row, with the score of each try shown

Training and evaluation differ by their seeds only, `seed` and `eval_seed`. Tasks with few different items may give the
same item to both.

The package's own curriculum of a task (`reasoning_gym.coaching`): the level of items follows recent success.

The data source uses it with `plugins.reasoning_gym.curriculum`. The level changes only between rollouts, and depends
only on scores of the current level, in any order. So a run and the same run resumed draw the same items, whichever
group finishes first.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slime_core import (
    Args,
    DatasetSource,
    Group,
    PluginOptions,
    Sample,
    Step,
    execution_rewards,
    last_boxed,
    options,
    write_lines,
)
from slime_core.errors import ConfigError
from slime_environments.reasoning_gym.tasks import TaskRows, dataset_of, score

_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


class Options(PluginOptions):
    """Options of the plugin: `--set plugins.reasoning_gym.task=leg_counting`."""

    task: str = "chain_sum"
    """Any task of the package; "composite" mixes the tasks of `datasets`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings: ranges, sizes, difficulty."""
    datasets: list[dict[str, Any]] = Field(default_factory=list)
    """Tasks of "composite", each as {name, weight, config}."""
    seed: int | None = None
    """Seed of the training items; default --rollout-seed."""
    eval_seed: int = 1_000_003
    """Seed of the evaluation items that the recipe writes."""
    size: int = 100_000
    """Number of training items before they repeat."""
    eval_size: int = 200
    """Number of items in each file that the recipe writes."""
    system_prompt: str | None = None
    """System prompt; the prompt is then chat messages. "default", "direct", ... name the package's own prompts.
    Without it the prompt is the question as text."""
    answer: Literal["tag", "boxed", "text"] = "tag"
    """Place of the answer in a response: the last <answer></answer>, the last \\\\boxed{}, or the whole text."""
    tries: int = 1
    """Answers per episode of the environment; the first right answer counts, or else the last answer."""
    curriculum: bool = False
    """Whether training items follow the package's curriculum of the task, whose level follows recent groups' scores."""
    level: int = Field(0, ge=0)
    """The curriculum's first level."""
    level_window: int = Field(64, gt=0)
    """Number of groups that are scored at a level before it changes."""
    raise_at: float = 0.8
    """Mean score of these groups at or above which the level rises."""
    lower_at: float = 0.2
    """Mean score of these groups below which the level falls."""


class ReasoningGymSource(DatasetSource):
    """The data source: `--rollout-shuffle`, `--buffer-filter-path` and so on work as with a file."""

    _curriculum: Curriculum | None = None

    def open_rows(self) -> TaskRows:
        """Return the items of the task as rows."""
        own = options(self.args, "reasoning_gym", Options)
        seed = self.args.rollout_seed if own.seed is None else own.seed
        of_items = _of_items(self.args, own, seed, own.size, self.args.input_key, self.args.label_key)
        if not own.curriculum:
            return TaskRows(*of_items)
        rows = LevelRows(*of_items, own.level)
        self._curriculum = Curriculum(rows, own.level_window, own.raise_at, own.lower_at)
        return rows

    def begin_rollout(self, rollout_id: int, weight_version: int) -> None:
        """Begin a rollout; the curriculum's level changes here."""
        super().begin_rollout(rollout_id, weight_version)
        if self._curriculum is not None:
            self._curriculum.move()

    def observe(self, groups: list[Group], trained: bool) -> None:
        """Pass scored groups to the buffer and the curriculum."""
        super().observe(groups, trained)
        if self._curriculum is None:
            return
        for group in groups:
            if rewards := execution_rewards(self.args, group):
                self._curriculum.observe(_facts(group[0]).get("level"), statistics.fmean(rewards))

    def take_metrics(self) -> dict[str, float]:
        """Return the buffer's metrics, and the curriculum's level."""
        level = {} if self._curriculum is None else {"rollout/reasoning_gym/level": float(self._curriculum.level)}
        return {**super().take_metrics(), **level}

    def state_dict(self) -> dict[str, Any]:
        """Return the data source's state, and the curriculum's state."""
        own = {} if self._curriculum is None else {"curriculum": self._curriculum.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`. Raises CheckpointError."""
        super().load_state_dict(state)
        if self._curriculum is not None:
            self._curriculum.load_state_dict(state["curriculum"])


def reward(args: Args, sample: Sample) -> float:
    """Return the verifier's score, mostly in [0, 1]; 0 if the verifier raises on the answer.

    Raises:
        ConfigError: The sample's row is not from reasoning-gym.
    """
    value, problem = score(_facts(sample), answer_in(sample.response, options(args, "reasoning_gym", Options).answer))
    if problem:
        sample.metadata["verifier_raised"] = problem
    return value


def answer_in(response: str, how: str) -> str | None:
    """Return the answer in a response, or None if it has no answer."""
    if how == "boxed":
        return last_boxed(response)
    if how == "tag":
        found = _ANSWER.findall(response)
        return found[-1].strip() if found else None
    return re.sub(r"<\|[^|<>]*\|>\s*\Z", "", response).strip()


def prepare(args: Args) -> None:
    """Write the missing files of `--eval-prompt-data` (the recipe)."""
    own = options(args, "reasoning_gym", Options)
    for path in map(Path, (args.eval_prompt_data or [])[1::2]):
        if path.exists():
            continue
        input_key = args.eval_input_key or args.input_key
        label_key = args.eval_label_key or args.label_key
        rows = TaskRows(*_of_items(args, own, own.eval_seed, own.eval_size, input_key, label_key))
        write_lines(path, (json.dumps(rows[i]).encode() for i in range(len(rows))))


class ReasoningGym:
    """An episode of answers until an answer is right or `tries` is reached; plain methods, since verifiers are slow."""

    def __init__(self, args: Args) -> None:
        self._own = options(args, "reasoning_gym", Options)
        self._facts: dict[str, Any] = {}
        self._tries = 0

    def reset(self, sample: Sample) -> None:
        """Begin a row; the row's prompt is the only observation."""
        self._facts, self._tries = _facts(sample), 0

    def step(self, action: str) -> Step:
        """Score an answer, and show the score."""
        self._tries += 1
        value, problem = score(self._facts, answer_in(action, self._own.answer))
        done = value >= 1.0 or self._tries >= self._own.tries
        info = {"score": value, "tries": self._tries, **({"verifier_raised": problem} if problem else {})}
        return Step(f"Your answer scores {value:g}. Try again.", value if done else 0.0, done, info)

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def snapshot(self) -> int:
        """Return the number of tries so far."""
        return self._tries

    def restore(self, sample: Sample, state: int) -> None:
        """Resume after `state` tries."""
        self._facts, self._tries = _facts(sample), state


def _facts(sample: Sample) -> dict[str, Any]:
    facts = sample.metadata.get("reasoning_gym")
    if not isinstance(facts, dict):
        raise ConfigError(
            f"sample {sample.index} is no item of reasoning-gym (metadata has no 'reasoning_gym'); items come from"
            " --data-source-path reasoning_gym, or from a file that --prepare-path reasoning_gym wrote"
        )
    return facts


def _of_items(
    args: Args, own: Options, seed: int, size: int, input_key: str | None, label_key: str | None
) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Return the arguments of `TaskRows`."""
    config = {**own.config, "seed": seed, "size": size}
    if own.datasets:
        config["datasets"] = [{"weight": 1.0, "config": {}, **part} for part in own.datasets]
    columns = {"input": input_key or "input", "label": label_key or "label", "metadata": args.metadata_key}
    return {"name": own.task, "config": config}, columns, _system_prompt(own.system_prompt)


def _system_prompt(named: str | None) -> str | None:
    if named is None:
        return None
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return str(SYSTEM_PROMPTS.get(named, named))


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
