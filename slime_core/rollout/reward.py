"""Finished samples -> rewards.

`rollout.generate` calls `score` per sample, or once per complete group (`--group-rm`). If a reward function raises,
exceeds `--rm-timeout`, ends its process or returns a value that is not a number, its samples become FAILED with the
reason, a plugin saves a file to reproduce the failure (`FailureLog`), and the run continues. The scorer of a sample is
its own `custom_rm_path`, else its row's or data set's `rm_type` in `metadata`, else the run's reward. An evaluation
data set with its own plugin options also has its own scorer.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.distributions import offered
from slime_core.errors import ConfigError, PluginError
from slime_core.protocols import Args
from slime_core.sample import LARGEST_SCORE, Sample, SampleStatus, is_score
from slime_core.sample.admission import Sealed
from slime_core.waits import waiting, when_placed
from slime_core.workers.call import DeadlineExceeded

if TYPE_CHECKING:
    from slime_core.plugins.adapters import RewardCaller

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """Processes in which rewards run (`launch.components.Resolver` has them)."""

    def settings_changed(self) -> None:
        """Send the current settings to the processes."""

    def close(self) -> None:
        """End the processes."""


class FailureLog(Protocol):
    """A log of the calls of rewards that failed."""

    num_failed: int

    def save(
        self,
        samples: Sequence[Sample],
        scorer: RewardCaller,
        error: BaseException,
        *,
        evaluation: bool,
        rollout_id: int | None,
        args: Args | None = None,
    ) -> str | None:
        """Save one failed call, before its samples are marked; return the file's path, or None if it was not saved.

        `args` are the call's settings, if they are not the run's.
        """


class RewardStage:
    """The stage that calls reward functions and records their failures in the samples."""

    def __init__(
        self,
        args: Args,
        default: RewardCaller | None,
        resolve: Callable[[str], RewardCaller],
        *,
        workers: Workers | None = None,
    ) -> None:
        self.args = args
        self.default = default
        self._resolve = cache(resolve)
        self._workers = workers
        self._under: dict[tuple[str, bytes], RewardCaller] = {}
        """(spec, plugin options) -> the reward with these options."""

    @cached_property
    def failures(self) -> FailureLog | None:
        """Log that saves failed calls, if a plugin is installed that has it (entry-point group `slime.failures`)."""
        log: Callable[[Args], FailureLog] | None = offered("slime.failures", "rewards")
        return None if log is None else log(self.args)

    @property
    def scores_groups(self) -> bool:
        """True if complete groups are scored together (`--group-rm`, or declared by the reward)."""
        return self.default is not None and self.default.scores_groups

    def require(self, spec: str, where: str) -> None:
        """Resolve the reward of a row before the run starts. Raises ConfigError beginning with `where`."""
        try:
            self._resolve(spec)
        except PluginError as error:
            raise ConfigError(f"{where} names the reward {spec!r}: {error}") from error

    async def start(self) -> None:
        """Start the worker processes with the run's reward. Raises PluginError if it does not load there."""
        if self.default is not None:
            await self.default.start()

    def settings_changed(self) -> None:
        """Update the worker processes' copy of `args`; call it when `args` was changed after `start`."""
        if self._workers is not None:
            self._workers.settings_changed()

    def close(self) -> None:
        """End the worker processes; safe to call twice."""
        if self._workers is not None:
            self._workers.close()

    def scorer_of(self, sample: Sample, args: Args | None = None) -> RewardCaller:
        """Return the function that scores this sample, with the plugin options of `args` (None: the run's).

        Raises:
            PluginError: No reward has that name, or it does not accept these options.
        """
        scorer = self._run_scorer(sample)
        if args is None or args.plugins == self.args.plugins:
            return scorer
        key = scorer.spec, pickle.dumps(args.plugins)
        if key not in self._under:
            self._under[key] = scorer.under(args)
        return self._under[key]

    def _run_scorer(self, sample: Sample) -> RewardCaller:
        spec = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
        if not spec:
            if self.default is None:
                raise LookupError("no reward function: set --rm-type or --custom-rm-path")
            return self.default
        return self._resolve(spec)

    async def score(
        self,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """Set `sample.reward`, in one call per function where the function takes several; `args` as `scorer_of`.

        Aborted, failed and already rewarded samples are skipped. A copy replaces a sample to which an abandoned call
        may still write.
        """
        calls: dict[int, tuple[RewardCaller, list[Sample]]] = {}
        for sample in samples:
            if sample.reward is not None or sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED):
                continue
            try:
                scorer = self.scorer_of(sample, args)
            except Exception as error:
                sample.fail("reward", error)
                continue
            calls.setdefault(id(scorer if scorer.batched else sample), (scorer, []))[1].append(sample)
        begun = [self.call(*each, evaluation=evaluation, rollout_id=rollout_id, args=args) for each in calls.values()]
        if len(begun) == 1:  # the usual case needs no separate task
            await begun[0]
        else:
            await asyncio.gather(*begun)
        given = self.args if args is None else args
        for place, sample in enumerate(samples):
            sample.note_components((given.eval_reward_key if evaluation else None) or given.reward_key)
            if sample.metadata.get("failure", {}).pop("left_behind", False):
                samples[place] = copy.deepcopy(sample)

    async def call(
        self,
        scorer: RewardCaller,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """Call one function; afterwards its samples have rewards or have failed. `args`: the function's settings."""
        sealed = Sealed(samples)
        try:
            of = f" of sample {samples[0].index}" if len(samples) == 1 else f" of group {samples[0].group_index}"
            with waiting(scorer.label + of, deadline=None, then="the samples fail", queued=True) as wait:
                when_placed(lambda: wait.restart(self.args.rm_timeout))  # for `slime why`; `score` ends it
                rewards = await scorer.score(samples, evaluation)
        except Exception as error:
            logger.debug("%s failed", scorer.label, exc_info=True)
            call: dict[str, Any] = {"evaluation": evaluation, "rollout_id": rollout_id, "args": args}
            saved = self.failures.save(samples, scorer, error, **call) if self.failures else None
            for sample in samples:
                was = str(sample.status)
                sample.fail(scorer.label, error)
                sample.metadata["failure"] |= {"status": was, **({"saved": saved} if saved else {})}
                if isinstance(error, DeadlineExceeded) and error.left_behind:
                    sample.metadata["failure"]["left_behind"] = True
            return
        for sample, reward in zip(samples, rewards):
            try:
                sample.validate()  # a reward may write to its sample
            except ValueError as problem:
                sample.fail(scorer.label, problem)
            else:
                sample.reward = reward
        for sample, change in sealed.edits():
            sample.fail(scorer.label, change)


def reward_problem(reward: object) -> str | None:
    """Return why a reward that a generate function set cannot be used; None if it can."""
    if reward is None or isinstance(reward, Mapping):
        return None
    problem = number_problem(reward)
    return problem and f"set sample.reward, which {problem}; expected a number or a mapping of numbers"


def number_problem(value: object) -> str | None:
    """Return why a value is not a score, as text to follow "it"; None if it is a score."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return f"is {type(value).__name__}, not a number"
    if is_score(value := value if isinstance(value, int) else float(value)):
        return None
    if isinstance(value, int) or math.isfinite(value):
        return f"is beyond {LARGEST_SCORE:g}: {value!s:.40}"
    return f"is not finite: {value}"


def check_named_rewards(rewards: RewardStage, args: Args, source: object) -> None:
    """Resolve the rewards that rows of the data name (`slime_data.named_rewards`). Raises ConfigError, DataError."""
    if (named := offered("slime.data", "named_rewards")) is not None:
        named.check_named_rewards(rewards, args, source)
