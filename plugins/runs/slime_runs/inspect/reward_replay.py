"""Saved samples -> rewards of another function, together with the saved rewards.

`slime rewards replay` reads dumps of rollouts (`saved.read_samples`) and reproductions of failed scores
(`reward_failures`) through `read_saved` and scores them with `rescore`. A sample whose *generation* failed or was
aborted is skipped, since it has no response to score. A sample whose scoring failed is scored again.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_data.saved import grouped, read_samples

from slime_core.errors import DataError
from slime_core.plugins.adapters import RewardCaller
from slime_core.rollout.reward import RewardStage
from slime_core.sample import Sample, SampleStatus
from slime_runs.files import saved_files
from slime_runs.inspect.reward_failures import FORMAT

_AT_ONCE = 2048
"""Largest number of samples in flight; more would only wait in memory."""


@dataclass
class Saved:
    """The samples of a file."""

    path: Path
    samples: list[Sample]
    spec: str | None = None
    """Spec of the reward that failed on the samples; None for a dump."""
    evaluation: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings saved with a failed score."""


@dataclass
class Outcome:
    """The result of scoring a sample again."""

    file: str
    index: int | None
    old: Any
    """Reward in the file; None if scoring failed."""
    new: Any = None
    error: str | None = None
    """Reason for a missing new reward."""
    response: str = ""
    label: Any = None

    @property
    def differs(self) -> bool:
        """Whether the new reward differs from the old one, or is missing."""
        return self.error is not None or self.old != self.new


def read_saved(patterns: Iterable[str]) -> list[Saved]:
    """Read the files of paths and glob patterns, in order. Raises DataError."""
    return [_read(path) for path in saved_files(patterns)]


def _read(path: Path) -> Saved:
    try:
        record = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    except (ValueError, OSError):
        record = None  # a file with several lines is a dump; read_samples reports other files
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return Saved(path, read_samples(path))
    try:
        samples = [Sample.from_dict(row) for row in record["samples"]]
        return Saved(path, samples, record["component"]["spec"], record["evaluation"], record["args"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a complete record of a failed score: {type(error).__name__}: {error}") from error


async def rescore(stage: RewardStage, scorer: RewardCaller, saved: Saved, *, label: Any = None) -> list[Outcome]:
    """Score the file's samples with `scorer`, even if the samples name rewards themselves.

    Args:
        stage: The stage that records failed calls in the samples.
        scorer: The reward function.
        saved: Samples; they are not changed.
        label: Replacement for every sample's label; None keeps the labels.
    """
    samples = [_fresh(sample, label) for sample in saved.samples]
    old = {id(copy): sample.reward for copy, sample in zip(samples, saved.samples)}
    samples = [s for s in samples if s.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)]
    calls = grouped(samples, len(samples) or 1) if scorer.batched else [[sample] for sample in samples]
    step = max(1, _AT_ONCE // max((len(call) for call in calls), default=1))
    for first in range(0, len(calls), step):
        await asyncio.gather(
            *(stage.call(scorer, call, evaluation=saved.evaluation) for call in calls[first : first + step])
        )
    return [_outcome(str(saved.path), s, old[id(s)]) for s in samples]


def _outcome(file: str, sample: Sample, old: Any) -> Outcome:
    failed = sample.status == SampleStatus.FAILED
    error = sample.metadata["failure"]["error"] if failed else None
    return Outcome(file, sample.index, old, None if failed else sample.reward, error, sample.response, sample.label)


def _fresh(sample: Sample, label: Any) -> Sample:
    """Return a copy without reward; if scoring had failed, the copy has the status from before the failure."""
    copy = Sample.from_dict(sample.to_dict())
    failure = copy.metadata.get("failure") or {}
    if copy.status == SampleStatus.FAILED and str(failure.get("where", "")).startswith("reward"):
        copy.status = SampleStatus(failure.get("status", SampleStatus.COMPLETED))
        del copy.metadata["failure"]
    copy.reward = None
    if label is not None:
        copy.label = label
    return copy


def summary(outcomes: Sequence[Outcome], num_samples: int, key: str | None) -> dict[str, Any]:
    """Return counts and means; the means are over samples that have both rewards as numbers."""
    pairs = [(scalar(o.old, key), scalar(o.new, key)) for o in outcomes if o.error is None]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return {
        "samples": num_samples,
        "scored": sum(o.error is None for o in outcomes),
        "failed": sum(o.error is not None for o in outcomes),
        "left_out": num_samples - len(outcomes),
        "changed": sum(o.differs for o in outcomes if o.error is None),
        "mean_old": statistics.fmean(a for a, _ in both) if both else None,
        "mean_new": statistics.fmean(b for _, b in both) if both else None,
    }


def scalar(reward: Any, key: str | None) -> float | None:
    """Return the number of a reward, or None if it has no number."""
    value = reward.get(key) if isinstance(reward, Mapping) else reward
    return float(value) if isinstance(value, (int, float)) else None
