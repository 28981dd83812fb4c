"""Checks of the values that user-supplied data sources and rollout functions return.

Each function returns the checked value, or raises RolloutError with the value found and the value expected.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from slime_core.data.buffer import is_finished
from slime_core.errors import RolloutError
from slime_core.fan_out import executions
from slime_core.sample import LARGEST_SCORE, is_score
from slime_core.types import Group, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, SampleStatus

logger = logging.getLogger(__name__)

_INDEX_STRIDE = 1 << 20
"""Count of numbers reserved per rollout for samples without a number; a resumed run assigns the same numbers."""


def first_number(rollout_id: int) -> int:
    """Return the `group_index` of the first group that a rollout draws from a data source without numbering."""
    return rollout_id * _INDEX_STRIDE


def drawn_groups(answer: Any, num_groups: int, rollout_id: int, numbered: int) -> list[Group]:
    """Check a data source's result: `num_groups` non-empty lists of samples; number the unnumbered samples.

    Args:
        answer: Result of `get_samples(num_groups)`.
        num_groups: Number of requested groups.
        rollout_id: The rollout that draws the groups.
        numbered: Number of groups that this rollout drew before.
    """
    expected = f"--data-source-path: get_samples({num_groups}) must return {num_groups} non-empty lists of Samples"
    if not isinstance(answer, list) or not all(isinstance(g, list) and g for g in answer):
        raise RolloutError(f"{expected}; it returned {_shape(answer)}")
    if not all(isinstance(s, Sample) for group in answer for s in group):
        raise RolloutError(f"{expected}; a group held {_shape(answer[0])}")
    if len(answer) != num_groups:
        raise RolloutError(f"{expected}; it returned {len(answer)}")
    next_group = first_number(rollout_id) + numbered
    for offset, group in enumerate(answer):
        for position, sample in enumerate(group):
            # Without their own numbers, all samples of a group would be sampled with the same seed.
            if sample.group_index is None:
                sample.group_index = next_group + offset
            if sample.index is None:
                sample.index = (next_group + offset) * len(group) + position
        members = [siblings[0] for siblings in executions(group)]  # a partial rollout may bring siblings back
        if len({s.index for s in members}) < len(members) and not is_finished(group):
            raise RolloutError(
                f"--data-source-path: the samples of group {group[0].group_index} share an index"
                f" ({[s.index for s in group]}); every sample needs its own"
            )
    return answer


def train_output(answer: Any) -> RolloutFnTrainOutput:
    """Check a rollout function's result for training: a `RolloutFnTrainOutput` or THUDM/slime's bare list of groups."""
    output = answer if isinstance(answer, RolloutFnTrainOutput) else RolloutFnTrainOutput(answer)
    if not isinstance(output.samples, list) or not isinstance(output.metrics, Mapping):
        raise RolloutError(
            "--rollout-function-path: must return RolloutFnTrainOutput(samples, metrics) or a list of groups;"
            f" it returned {_shape(answer)}"
        )
    return RolloutFnTrainOutput([flatten(group) for group in output.samples], dict(output.metrics))


def eval_output(answer: Any) -> RolloutFnEvalOutput:
    """Check a rollout function's result for evaluation: `{data set: {"rewards", "truncated", "samples"}}`.

    A reward that is not a finite number becomes 0.0 and its sample FAILED; without samples, `failed` counts them.
    """
    output = answer if isinstance(answer, RolloutFnEvalOutput) else RolloutFnEvalOutput(answer)
    expected = "--eval-function-path: must return {data set: {'rewards': [...], 'truncated': [...], 'samples': [...]}}"
    if not isinstance(output.data, Mapping):
        raise RolloutError(f"{expected}; it returned {_shape(answer)}")
    for name, columns in output.data.items():
        if not isinstance(columns, Mapping) or "rewards" not in columns or "truncated" not in columns:
            raise RolloutError(f"{expected}; for {name!r} it returned {_shape(columns)}")
    return RolloutFnEvalOutput({n: _scored(n, columns) for n, columns in output.data.items()}, output.metrics)


def _scored(name: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    rewards, samples = list(columns["rewards"]), columns.get("samples") or []
    problems = [number_problem(reward) for reward in rewards]
    failed = sum(problem is not None for problem in problems)
    if not failed:
        return dict(columns)
    first = next(place for place, problem in enumerate(problems) if problem is not None)
    logger.warning(
        "--eval-function-path: %d of %d rewards of %r are no finite numbers (the first is number %d: %r); they count"
        " as 0 and as failed",
        *(failed, len(rewards), name, first, rewards[first]),
    )
    if len(samples) == len(rewards):
        for sample, problem in zip(samples, problems):
            if problem is not None and sample.status != SampleStatus.FAILED:
                sample.fail("--eval-function-path", f"its reward {problem}")
    scored = [0.0 if problem is not None else reward for reward, problem in zip(rewards, problems)]
    return {**columns, "rewards": scored, "failed": failed}


def flatten(group: Any) -> Group:
    """Return the samples of a group of samples or lists of fan-out siblings, in order. Raises RolloutError."""
    if isinstance(group, Sample):
        return [group]
    if not isinstance(group, list):
        raise RolloutError(f"--rollout-function-path: a group must be a list of Samples; found {_shape(group)}")
    return [sample for item in group for sample in flatten(item)]


def reward_problem(reward: Any) -> str | None:
    """Return why a reward that a generate function set cannot be used; None if it can."""
    if reward is None or isinstance(reward, Mapping):
        return None
    if isinstance(reward, str) or not hasattr(reward, "__float__"):
        return f"set sample.reward to {type(reward).__name__}; expected a number or a mapping of numbers"
    problem = number_problem(reward)
    return None if problem is None else f"set sample.reward to what {problem}"


def number_problem(value: Any) -> str | None:
    """Return why a value is not a score, as text to follow "it"; None if it is a score."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return f"is {type(value).__name__}, not a number"
    if is_score(value := value if isinstance(value, int) else float(value)):
        return None
    if isinstance(value, int) or math.isfinite(value):
        return f"is beyond {LARGEST_SCORE:g}: {value!s:.40}"
    return f"is not finite: {value}"


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with keys {sorted(map(str, value))}"
    if isinstance(value, list):
        return f"a list of {len(value)} {type(value[0]).__name__}" if value else "an empty list"
    return type(value).__name__
