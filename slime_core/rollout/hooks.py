"""The user's functions around a rollout: after generating a sample, at the end of a rollout, and when it is logged.

Resolved by `launch.components`, called by `rollout.generate` (sample hooks) and `rollout.stage` (all others).
What a reader would get wrong: these functions run once per rollout or sample, in the process that generates; with
several trainer processes that is rank 0. A sample hook that raises fails its sample, as a generate function does; what
another one raises ends the run, under its flag's name.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import RolloutError, SlimeError
from slime_core.plugins.boundary import awaited, contained, raised_at
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args
from slime_core.types import Group, Sample, SampleStatus
from slime_core.waits import waiting

logger = logging.getLogger(__name__)

_UNFINISHED = (SampleStatus.FAILED, SampleStatus.ABORTED)


class SampleHook:
    """One `--rollout-sample-hook-path`: `fn(args, sample[, rollout_id][, evaluation])`, plain or async."""

    def __init__(self, function: Callable[..., Any], label: str) -> None:
        self.label = label
        self._function = function
        self._keywords = declared(function, ("rollout_id", "evaluation"))

    async def call(self, args: Args, sample: Sample, offered: Mapping[str, Any]) -> Sample:
        """The sample to go on with; FAILED where the function raised or overran `--rollout-timeout`.

        Raises:
            RolloutError: It returned something else than a Sample or None.
        """
        keywords = {name: offered[name] for name in self._keywords}
        clock = asyncio.timeout(args.rollout_timeout)
        try:
            with waiting(self.label, deadline=args.rollout_timeout, then="the sample fails"):
                async with clock:
                    result = contained(self.label, functools.partial(self._function, args, sample, **keywords))
                    if inspect.isawaitable(result):
                        result = await awaited(self.label, result)
        except Exception as error:
            fail_call(sample, self.label, error, clock, args)
            return sample
        if result is None:
            return sample
        if isinstance(result, Sample):
            return result
        raise RolloutError(
            f"{self.label} returned {type(result).__name__} for sample {sample.index}; expected a Sample, or None to"
            " keep the one it was given"
        )


def fail_call(sample: Sample, label: str, error: Exception, clock: asyncio.Timeout, args: Args) -> None:
    """Mark the sample of a call that raised, or overran its `clock`; `failure["at"]` is the line of user code."""
    logger.debug("%s failed", label, exc_info=error)
    if clock.expired():
        sample.fail(label, f"not done within --rollout-timeout {args.rollout_timeout} s")
        return
    sample.fail(label, error)
    if not isinstance(error, SlimeError):
        sample.metadata["failure"]["at"] = raised_at(error)


@dataclass
class RolloutHooks:
    """Those of one run; the functions are guarded, so that what they raise names their flag."""

    on_sample: Sequence[SampleHook] = ()
    filter_samples: Callable[..., Any] | None = None
    """`--rollout-sample-filter-path`: marks samples with `remove_sample`."""
    process_all: Callable[..., Any] | None = None
    """`--rollout-all-samples-process-path`."""
    log_rollout: Callable[..., Any] | None = None
    """`--custom-rollout-log-function-path`."""
    log_eval: Callable[..., Any] | None = None
    """`--custom-eval-rollout-log-function-path`."""
    _warned: set[str] = field(default_factory=set)

    async def after_generation(
        self, args: Args, siblings: list[Sample], rollout_id: int | None, evaluation: bool
    ) -> list[Sample]:
        """Give each finished sample to every hook in turn; failed and aborted ones are left alone.

        A sample that a partial rollout continues is seen once, when it is finished. Fan-out siblings keep their order.
        """
        offered = {"rollout_id": rollout_id, "evaluation": evaluation}
        return [await self._one(args, sample, offered) for sample in siblings]

    async def _one(self, args: Args, sample: Sample, offered: Mapping[str, Any]) -> Sample:
        for hook in self.on_sample:
            if sample.status in _UNFINISHED:
                break
            sample = await hook.call(args, sample, offered)
        return sample

    def after_rollout(self, args: Args, groups: list[Group], all_groups: list[Group], data_source: Any) -> None:
        """Filter, then show every group.

        Args:
            args: The run's settings.
            groups: What goes to training; the filter marks samples in it.
            all_groups: Also those that were dropped.
            data_source: The object of `--data-source-path`, handed on.
        """
        if self.filter_samples is not None:
            answer = self.filter_samples(args, groups)
            self._expect_nothing(answer, "--rollout-sample-filter-path", "set sample.remove_sample instead")
        if self.process_all is not None:
            answer = self.process_all(args, all_groups, data_source)
            self._expect_nothing(answer, "--rollout-all-samples-process-path", "what it returns is not used")

    def _expect_nothing(self, answer: Any, flag: str, hint: str) -> None:
        if answer is not None and flag not in self._warned:
            self._warned.add(flag)
            logger.warning("%s returned %s, which has no effect; %s", flag, type(answer).__name__, hint)
