"""The hooks around a rollout: after generating a sample and at the end of a rollout.

Put together by `launch.components`, called by `rollout.generate` (sample hooks) and `rollout.stage` (all others). They
run in the process that generates; with several trainer processes that is rank 0. If a sample hook raises, its sample
fails, as with a generate function. An error of another hook ends the run and names the hook's flag or plugin.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slime_core.errors import RolloutError, SlimeError
from slime_core.plugins.hooks import Hooks, nobody
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args
from slime_core.sample import Group, Sample, SampleStatus
from slime_core.sample.admission import DECLARE, Sealed, changed, snapshot
from slime_core.waits import Overdue, by_deadline, waiting
from slime_core.workers.call import awaited, contained, raised_at

logger = logging.getLogger(__name__)

_UNFINISHED = (SampleStatus.FAILED, SampleStatus.ABORTED)


class SampleHook:
    """A `slime_sample_generated` hook: `fn(args, sample[, rollout_id][, evaluation])`, plain or async."""

    def __init__(self, function: Callable[..., object], label: str, *, edits: bool = False) -> None:
        """`edits`: the hook may change the sample's training data."""
        self.label = label
        self._function = function
        self._edits = edits
        self._keywords = declared(function, ("rollout_id", "evaluation"))

    async def call(self, args: Args, sample: Sample, offered: Mapping[str, object]) -> Sample:
        """Return the sample to use; FAILED if the function raised, overran `--rollout-timeout` or may not edit.

        Raises:
            RolloutError: The function returned neither a Sample nor None.
        """
        keywords = {name: offered[name] for name in self._keywords}
        before = snapshot(sample)
        try:
            with waiting(self.label, deadline=args.rollout_timeout, then="the sample fails"):
                result = contained(self.label, functools.partial(self._function, args, sample, **keywords))
                if inspect.isawaitable(result):
                    result = await by_deadline(awaited(self.label, result), args.rollout_timeout)
        except Exception as error:
            return failed_call(sample, self.label, error, args)
        if result is not None and not isinstance(result, Sample):
            raise RolloutError(
                f"{self.label} returned {type(result).__name__} for sample {sample.index}; expected a Sample, or None"
                " to keep the one it was given"
            )
        sample = sample if result is None else result
        if not self._edits and (problem := changed(sample, before)):
            sample.fail(self.label, problem + DECLARE)
        return sample


def failed_call(sample: Sample, label: str, error: Exception, args: Args) -> Sample:
    """Return the sample of a call that raised or was overdue, marked; a copy if the call may still write to it.

    `failure["at"]` is the line of user code.
    """
    logger.debug("%s failed", label, exc_info=error)
    if isinstance(error, Overdue):
        sample.fail(label, f"not done within --rollout-timeout {args.rollout_timeout} s")
        return copy.deepcopy(sample) if error.left_behind else sample
    sample.fail(label, error)
    if not isinstance(error, SlimeError):
        sample.metadata["failure"]["at"] = raised_at(error)
    return sample


@dataclass
class RolloutHooks:
    """Hooks of one run that concern rollouts."""

    on_sample: Sequence[SampleHook] = ()
    told: Hooks = field(default_factory=nobody)
    """Receiver of all other events."""
    generates: bool = True
    """False for saved samples: all hooks except the log functions have already seen them."""

    @classmethod
    def of(cls, hooks: Hooks) -> RolloutHooks:
        """Return the hooks of a run that generates."""
        found = hooks.each("slime_sample_generated")
        return cls([SampleHook(_alone(tell), label, edits=edits) for label, tell, edits in found], hooks)

    @property
    def sample_labels(self) -> str:
        """Labels of the hooks that may have changed a sample, for errors."""
        return " or ".join(hook.label for hook in self.on_sample)

    @property
    def wants_all_groups(self) -> bool:
        """True if a hook also needs the dropped groups."""
        return self.generates and self.told.implemented("slime_process_all_samples")

    async def after_generation(
        self, args: Args, siblings: list[Sample], rollout_id: int | None, evaluation: bool
    ) -> list[Sample]:
        """Give each finished sample to every hook in turn; failed and aborted ones are left alone.

        A sample that a partial rollout continues is seen once, when it is finished. Fan-out siblings keep their order.
        """
        offered = {"rollout_id": rollout_id, "evaluation": evaluation}
        return [await self._one(args, sample, offered) for sample in siblings]

    async def _one(self, args: Args, sample: Sample, offered: Mapping[str, object]) -> Sample:
        for hook in self.on_sample:
            if sample.status in _UNFINISHED:
                break
            sample = await hook.call(args, sample, offered)
        return sample

    def after_rollout(
        self, args: Args, groups: list[Group], all_groups: list[Group], data_source: object, reasons: Mapping[int, str]
    ) -> None:
        """Filter, then show every group. Raises PluginError for an undeclared change of what is trained on.

        Args:
            args: The run's settings.
            groups: Groups for training; filters mark samples in them.
            all_groups: All groups, including the dropped ones.
            data_source: The object of `--data-source-path`, passed on.
            reasons: `group_index` -> reason why the group was dropped.
        """
        if self.generates:
            self._show("slime_filter_samples", groups, args=args, groups=groups)
            given = {"all_groups": all_groups, "data_source": data_source, "reasons": reasons}
            self._show("slime_process_all_samples", all_groups, args=args, **given)

    def _show(self, name: str, seen: list[Group], /, **given: object) -> None:
        for label, tell, edits in self.told.each(name):
            sealed = Sealed(() if edits else (sample for group in seen for sample in group))
            tell(**given)
            sealed.check(label)


def _alone(tell: Callable[..., Sequence[object]]) -> Callable[..., object]:
    """Return a function that calls one plugin and returns its result; None if it has no result."""

    def call(args: Args, sample: Sample, *, rollout_id: int | None, evaluation: bool) -> object:
        answers = tell(args=args, sample=sample, rollout_id=rollout_id, evaluation=evaluation)
        return answers[0] if answers else None

    return call
