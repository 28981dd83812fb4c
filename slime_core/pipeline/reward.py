"""Stage 4: finished samples -> rewards.

`pipeline.rollout` calls `score` per sample, or `score_group` once a group is complete (`--group-rm`). A reward
function that raises, overruns `--rm-timeout` or returns something that is no number makes its sample FAILED with the
reason; the run goes on. Which function scores a sample: its own `custom_rm_path`, else its data set's `rm_type` in
`metadata`, else the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from slime_core.types import Sample, SampleStatus


class Scorer(Protocol):
    """A resolved reward function (`plugins.adapters.RewardCaller`), which answers checked rewards or raises."""

    label: str
    batched: bool
    """True: takes several samples in one call."""
    scores_groups: bool
    """True: must see the whole group at once."""

    async def score(self, samples: list[Sample], evaluation: bool) -> list[Any]:
        """One reward per sample; may raise anything."""


class RewardStage:
    """Calls reward functions under a deadline and turns what goes wrong into data."""

    def __init__(self, args: Any, default: Scorer | None, resolve: Callable[[str], Scorer]) -> None:
        self.args = args
        self.default = default
        self._resolve = resolve
        self._cache: dict[str, Scorer] = {}

    @property
    def scores_groups(self) -> bool:
        """Samples are scored together once their group is complete (`--group-rm`, or the reward says so)."""
        return self.default is not None and self.default.scores_groups

    def scorer_of(self, sample: Sample) -> Scorer:
        """The function that scores this sample. Raises PluginError for an unknown name."""
        spec = sample.custom_rm_path or sample.metadata.get("custom_rm_path") or sample.metadata.get("rm_type")
        if not spec:
            if self.default is None:
                raise LookupError("no reward function: set --rm-type or --custom-rm-path")
            return self.default
        if spec not in self._cache:
            self._cache[spec] = self._resolve(spec)
        return self._cache[spec]

    async def score(self, sample: Sample, *, evaluation: bool = False) -> None:
        """Set `sample.reward`. Aborted, failed and already rewarded samples are left alone."""
        await self.score_group([sample], evaluation=evaluation)

    async def score_group(self, samples: list[Sample], *, evaluation: bool = False) -> None:
        """Score the samples that need it, in one call per function where the function takes several."""
        by_scorer: dict[int, tuple[Scorer, list[Sample]]] = {}
        for sample in samples:
            if sample.reward is not None or sample.status in (SampleStatus.ABORTED, SampleStatus.FAILED):
                continue
            try:
                scorer = self.scorer_of(sample)
            except Exception as error:
                sample.fail("reward", error)
                continue
            by_scorer.setdefault(id(scorer), (scorer, []))[1].append(sample)
        calls: list[tuple[Scorer, list[Sample]]] = []
        for scorer, members in by_scorer.values():
            calls.extend([(scorer, members)] if scorer.batched else [(scorer, [s]) for s in members])
        if len(calls) == 1:  # the usual case, without a task of its own
            await self._call(*calls[0], evaluation)
        else:
            await asyncio.gather(*(self._call(scorer, members, evaluation) for scorer, members in calls))

    async def _call(self, scorer: Scorer, samples: list[Sample], evaluation: bool) -> None:
        where = scorer.label
        try:
            async with asyncio.timeout(self.args.rm_timeout):
                rewards = await scorer.score(samples, evaluation)
        except TimeoutError:
            for sample in samples:
                sample.fail(where, f"no answer within --rm-timeout {self.args.rm_timeout} s")
            return
        except Exception as error:
            for sample in samples:
                sample.fail(where, error)
            return
        for sample, reward in zip(samples, rewards):
            sample.reward = reward
