"""Groups between the data source and training, as `rollout.producer` holds them, and as a commit does.

What a reader would get wrong: generation goes on while a commit is written, so samples in flight are stored as copies.
By default those are prompts again; with `--partial-rollout` they keep the turns that are finished, and rewards that
are there. What an engine has sampled of an unfinished request is not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime_core.errors import CheckpointError
from slime_core.fan_out import executions
from slime_core.rollout.generate import SampleRunner
from slime_core.rollout.open_groups import OpenGroup
from slime_core.rollout.pool import Flight, Flights
from slime_core.rollout.regenerate import FINISHED, prompts_of
from slime_core.rollout.staleness import retries, version_span
from slime_core.types import Group, Sample, SampleStatus

WAITING, ASIDE, IN_FLIGHT = "waiting", "aside", "in_flight"
"""Entry "state" of an open group's details."""


@dataclass
class Finished:
    """A group that was generated and decided on."""

    samples: Group
    original: Group
    """As it was drawn: other samples, where a generate function fanned out."""
    began: int
    """Weight version served when its generation began."""
    reason: str | None = None
    """Why the filter dropped it."""

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """Oldest and newest version of its tokens."""
        return version_span(self.samples, self.began)

    @property
    def retries(self) -> int:
        """How often it has been generated afresh for its age."""
        return retries(self.original)

    @property
    def index(self) -> int:
        """The `group_index`."""
        return self.samples[0].group_index or 0

    @property
    def turn(self) -> tuple[int, int]:
        """What orders groups for training: oldest version first, then as they were drawn."""
        return (self.span[0] if self.span else self.began, self.index)


class CountingRunner:
    """A `SampleRunner` for one group that says in its flight how many of its samples have not ended."""

    def __init__(self, runner: SampleRunner, flights: Flights, flight: Flight, told: Callable[[], None]) -> None:
        """`told` is called whenever a sample has ended."""
        self._runner = runner
        self._flights, self._flight, self._told = flights, flight, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    async def run_group(self, group: Group, params: dict[str, Any], **keywords: Any) -> Group:
        """As the runner's."""
        self._flights.resize(self._flight, len(group) + self._runner.greedy_baseline)
        return await self._runner.run_group(group, params, sample_done=self._done, **keywords)

    def _done(self, siblings: list[Sample]) -> None:
        if any(s.status == SampleStatus.ABORTED for s in siblings):
            return  # the group comes back and needs the place again: it is not given to another one
        self._flights.resize(self._flight, self._flight.unfinished - 1)
        self._told()


def finished_to_open(group: Finished, state: str) -> OpenGroup:
    """A finished group for a commit; a fan-out's prompts go with it, as it may have to be generated afresh."""
    details: dict[str, Any] = {"state": state, "began": group.began}
    if [id(s) for s in group.samples] != [id(s) for s in group.original]:
        details["prompts"] = [s.to_dict() for s in prompts_of(group.original)]
    return OpenGroup(group.samples, details=details)


def flight_to_open(flight: Flight, *, partial: bool, scores_groups: bool) -> OpenGroup:
    """A group in flight for a commit, as it is to be continued."""
    samples = _resumable(flight.original, scores_groups) if partial else prompts_of(flight.original)
    return OpenGroup(samples, details={"state": IN_FLIGHT, "began": flight.began})


def open_to_finished(group: OpenGroup) -> Finished:
    """Inverse of `finished_to_open`."""
    prompts = group.details.get("prompts")
    original = [Sample.from_dict(s) for s in prompts] if prompts else group.samples
    return Finished(group.samples, original, int(group.details["began"]))


def check_group_size(group: OpenGroup, size: int) -> Group:
    """The samples of an unfinished group. Raises CheckpointError when the run has groups of another size."""
    found = len(executions(group.samples))
    if found != size:
        raise CheckpointError(
            f"the checkpoint holds group {group.group_index}, unfinished, of {found} samples; this run has"
            f" --n-samples-per-prompt {size}. Resume with --n-samples-per-prompt {found}"
        )
    return group.samples


def _copy(sample: Sample) -> Sample:
    return Sample.from_dict(sample.to_dict())


def _resumable(group: Group, scores_groups: bool) -> Group:
    """Copies with what is worth keeping: finished with its reward, or its finished turns; else the prompt."""
    kept: Group = []
    for siblings in executions(group):
        if len(siblings) > 1:  # given back whole by an earlier rollout
            kept += [_copy(sample) for sample in siblings]
        else:
            kept.append(_resumable_sample(siblings[0], scores_groups))
    return kept


def _resumable_sample(sample: Sample, scores_groups: bool) -> Sample:
    """A sample without its reward is scored only by a run that scores whole groups. One of several siblings, which have
    just been made of it, is no group's sample by itself, and one whose fields do not fit together is being written to.
    """
    try:
        sample.validate()
    except ValueError:
        return prompts_of([sample])[0]
    fan_out = sample.rollout_id is not None and sample.status in FINISHED
    unscored = sample.status in FINISHED and sample.reward is None and not scores_groups
    if sample.status == SampleStatus.FAILED or fan_out or unscored:
        return prompts_of([sample])[0]
    copy = _copy(sample)
    if copy.response_length and copy.status == SampleStatus.PENDING:
        copy.status = SampleStatus.ABORTED
    return copy
