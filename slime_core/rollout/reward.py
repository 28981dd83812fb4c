"""Stage 4: finished samples -> rewards.

`rollout.generate` calls `score` per sample, or once a group is complete (`--group-rm`). A reward
function that raises, overruns `--rm-timeout`, ends its process or returns something that is no number makes its
samples FAILED with the reason, and leaves a file to reproduce it (`reward_failures`); the run goes on. Which function
scores a sample: its own `custom_rm_path`, else its row's or data set's `rm_type` in `metadata`, else the run's. An
evaluation data set with plugin options of its own has a scorer of its own, too.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.admission import Sealed
from slime_core.errors import ConfigError, PluginError
from slime_core.protocols import Args
from slime_core.types import Sample, SampleStatus
from slime_core.waits import waiting, when_placed

if TYPE_CHECKING:
    from slime_core.rollout.reward_failures import FailureLog

logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """A resolved reward function (`plugins.adapters.RewardCaller`), which answers checked rewards or raises."""

    label: str
    spec: str
    """What it was resolved from."""
    provenance: Mapping[str, Any]
    batched: bool
    """True: takes several samples in one call."""
    scores_groups: bool
    """True: must see the whole group at once."""

    async def start(self) -> None:
        """Get ready to be called; raises what cannot work."""

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        """One reward per sample, under the deadline of a call, which begins where it says so (`waits.placed`).

        May raise anything.
        """

    def under(self, args: Args) -> Scorer:
        """The same reward under settings that differ from its own in `plugins`."""


class Workers(Protocol):
    """Processes in which rewards run (`plugins.workers.pool.WorkerPool`)."""

    def settings_changed(self) -> None:
        """Have them see the settings as they are now."""

    def close(self) -> None:
        """End them."""


class RewardStage:
    """Calls reward functions and turns what goes wrong into data."""

    def __init__(
        self,
        args: Args,
        default: Scorer | None,
        resolve: Callable[[str], Scorer],
        *,
        workers: Workers | None = None,
    ) -> None:
        self.args = args
        self.default = default
        self._resolve = resolve
        self._workers = workers
        self._cache: dict[str, Scorer] = {}
        self._under: dict[tuple[str, bytes], Scorer] = {}
        """(spec, plugin options) -> that reward with these."""

    @cached_property
    def failures(self) -> FailureLog:
        """Where calls that failed are kept."""
        from slime_core.rollout.reward_failures import FailureLog

        return FailureLog(self.args)

    @property
    def scores_groups(self) -> bool:
        """Samples are scored together once their group is complete (`--group-rm`, or the reward says so)."""
        return self.default is not None and self.default.scores_groups

    def require(self, spec: str, where: str) -> None:
        """Resolve what a row names before anything starts. Raises ConfigError beginning with `where`."""
        if spec in self._cache:
            return
        try:
            self._cache[spec] = self._resolve(spec)
        except PluginError as error:
            raise ConfigError(f"{where} names the reward {spec!r}: {error}") from error

    async def start(self) -> None:
        """Bring up the worker processes with the run's reward. Raises PluginError when it does not load there."""
        if self.default is not None:
            await self.default.start()

    def settings_changed(self) -> None:
        """To be called when `args` was changed after `start`: worker processes have a copy."""
        if self._workers is not None:
            self._workers.settings_changed()

    def close(self) -> None:
        """End the worker processes; safe to call twice."""
        if self._workers is not None:
            self._workers.close()

    def scorer_of(self, sample: Sample, args: Args | None = None) -> Scorer:
        """The function that scores this sample, with the plugin options in `args` (the run's for None).

        Raises:
            PluginError: There is none of that name, or it does not take these options.
        """
        scorer = self._run_scorer(sample)
        if args is None or args.plugins == self.args.plugins:
            return scorer
        key = scorer.spec, pickle.dumps(args.plugins)
        if key not in self._under:
            self._under[key] = scorer.under(args)
        return self._under[key]

    def _run_scorer(self, sample: Sample) -> Scorer:
        spec = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
        if not spec:
            if self.default is None:
                raise LookupError("no reward function: set --rm-type or --custom-rm-path")
            return self.default
        if spec not in self._cache:
            self._cache[spec] = self._resolve(spec)
        return self._cache[spec]

    async def score(
        self,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """Set `sample.reward`, in one call per function where the function takes several; `args` as `scorer_of`.

        Aborted, failed and already rewarded samples are left alone. A copy takes the place of a sample to which a call
        that is left behind may still write.
        """
        by_scorer: dict[int, tuple[Scorer, list[Sample]]] = {}
        for sample in samples:
            if sample.reward is not None or sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED):
                continue
            try:
                scorer = self.scorer_of(sample, args)
            except Exception as error:
                sample.fail("reward", error)
                continue
            by_scorer.setdefault(id(scorer), (scorer, []))[1].append(sample)
        calls: list[tuple[Scorer, list[Sample]]] = []
        for scorer, members in by_scorer.values():
            calls.extend([(scorer, members)] if scorer.batched else [(scorer, [s]) for s in members])
        if len(calls) == 1:  # the usual case, without a task of its own
            await self.call(*calls[0], evaluation=evaluation, rollout_id=rollout_id, args=args)
        else:
            await asyncio.gather(
                *(self.call(*each, evaluation=evaluation, rollout_id=rollout_id, args=args) for each in calls)
            )
        for place, sample in enumerate(samples):
            if sample.metadata.get("failure", {}).pop("left_behind", False):
                samples[place] = copy.deepcopy(sample)

    async def call(
        self,
        scorer: Scorer,
        samples: list[Sample],
        *,
        evaluation: bool = False,
        rollout_id: int | None = None,
        args: Args | None = None,
    ) -> None:
        """One call of one function; its samples have rewards afterwards, or have failed. `args`: what it has."""
        sealed = Sealed(samples)
        try:
            of = f" of sample {samples[0].index}" if len(samples) == 1 else f" of group {samples[0].group_index}"
            with waiting(scorer.label + of, deadline=None, then="the samples fail", queued=True) as wait:
                when_placed(lambda: wait.restart(self.args.rm_timeout))
                rewards = await scorer.score(samples, evaluation)
        except Exception as error:
            logger.debug("%s failed", scorer.label, exc_info=True)
            saved = self.failures.save(
                samples,
                scorer.spec,
                scorer.provenance,
                scorer.label,
                error,
                evaluation=evaluation,
                rollout_id=rollout_id,
                args=args,
            )
            for sample in samples:
                was = sample.status.value
                sample.fail(scorer.label, error)
                sample.metadata["failure"] |= {"status": was, **({"saved": saved} if saved else {})}
                if getattr(error, "left_behind", False):
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
